"""One layer's forward and backward pass with and without torch.compile: `python -m bench.compiled_layer [FAMILY]`.

The sizes are those of 75M parameters, for 8 sequences of 72 tokens in float32, by this repository's Qwen3 or by a Llama
of transformers. The command prints the CPU seconds of compiling, children included, how far the gradients differ from
those without it, and the least and the median of pairs of passes that take turns.
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.func import functional_call

_WIDTH: Final = 640
_INNER: Final = 1920
_HEADS: Final = 10
_KEY_HEADS: Final = 2
_HEAD: Final = 64
_BATCH: Final = (8, 72)  # neither is another size, which torch.compile would take for the same

Layer = Callable[..., Tensor]


def _qwen3() -> tuple[Layer, dict[str, tuple[int, ...]]]:
    """Return a layer as a function of weights, states, rotations and visible keys, and the shapes of its weights."""
    from grailnode.engine.qwen3 import Qwen3, Qwen3Config  # noqa: PLC0415

    model = Qwen3(Qwen3Config(32_000, _WIDTH, _INNER, 1, _HEADS, _KEY_HEADS, _HEAD, 1e-6, 10_000.0, True))

    def layer(weights: dict[str, Tensor], x: Tensor, cosine: Tensor, sine: Tensor, visible: Tensor) -> Tensor:
        return model._layer(weights, 0, x, (cosine[:, None], sine[:, None]), [visible], None)

    return layer, {name: shape for name, shape in model.shapes.items() if name.startswith("model.layers.")}


def _llama() -> tuple[Layer, dict[str, tuple[int, ...]]]:
    """Return the same of a model of transformers."""
    from transformers import LlamaConfig  # noqa: PLC0415
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer  # noqa: PLC0415

    config = LlamaConfig(
        hidden_size=_WIDTH, intermediate_size=_INNER, num_attention_heads=_HEADS, num_key_value_heads=_KEY_HEADS
    )
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        module: Any = LlamaDecoderLayer(config, 0)

    def layer(weights: dict[str, Tensor], x: Tensor, cosine: Tensor, sine: Tensor, visible: Tensor) -> Tensor:
        options = {"attention_mask": visible, "position_embeddings": (cosine, sine)}
        result: Tensor = functional_call(module, weights, (x,), options)
        return result

    return layer, {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def _cpu_seconds() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _pass(layer: Layer, weights: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Return the CPU seconds of a forward and backward pass, and the gradients."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*_BATCH, _WIDTH, generator=generator, requires_grad=True)
    angles = torch.arange(_BATCH[1])[None, :, None] * 10_000.0 ** -(torch.arange(_HEAD) % (_HEAD // 2) * 2 / _HEAD)
    angles = angles.expand(_BATCH[0], -1, -1)
    visible = torch.ones(_BATCH[0], 1, _BATCH[1], _BATCH[1], dtype=torch.bool).tril()
    for tensor in weights.values():
        tensor.grad = None
    began = time.process_time()
    layer(weights, x, angles.cos(), angles.sin(), visible).square().sum().backward()  # type: ignore[no-untyped-call]
    seconds = time.process_time() - began
    return seconds, {name: tensor.grad.clone() for name, tensor in weights.items() if tensor.grad is not None}


def main() -> None:
    """Print the figures of one family."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="?", choices=["qwen3", "llama"], default="qwen3")
    parser.add_argument("--pairs", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer, shapes = _qwen3() if options.family == "qwen3" else _llama()
    weights = {name: (torch.randn(shape) * 0.02).requires_grad_() for name, shape in shapes.items()}
    compiled: Layer = torch.compile(layer, dynamic=True)
    began = _cpu_seconds()
    _, gradients = _pass(compiled, weights)
    print(f"{options.family}: {_cpu_seconds() - began:.0f} CPU seconds to compile", flush=True)
    _, plain = _pass(layer, weights)
    print(f"gradients differ by {max(float((gradients[n] - plain[n]).norm() / plain[n].norm()) for n in plain):.1e}")
    pairs = [[_pass(way, weights)[0] for way in (layer, compiled)] for _ in range(options.pairs)]
    for name, seconds in zip(("plain", "compiled"), zip(*pairs, strict=True), strict=True):
        print(f"{name:<10} {min(seconds):.3f} s least, {statistics.median(seconds):.3f} s median")


if __name__ == "__main__":
    main()
