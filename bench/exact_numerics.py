"""What exact numerics cost: tokens a second of CPU time, beside torch's own float32. `python -m bench.exact_numerics`

Models with random weights, one thread: 16 completions of 64 tokens behind prompts of 32, generated in one batch, and
checked by one prefill.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
import trio

from grailnode.engine.exact_qwen3 import ExactQwen3
from grailnode.engine.qwen3 import Qwen3, Qwen3Config
from grailnode.engine.torch_engine import TorchEngine
from protocol.digest import Weights
from protocol.rollout.sampling import SamplingParams
from roles.policy.causal_model import CausalModel
from roles.ports import Request

COMPLETIONS, PROMPT, TOKENS = 16, 32, 64


def config(width: int, layers: int, vocabulary: int) -> Qwen3Config:
    """Return a Qwen3 of this size, with heads of 64."""
    return Qwen3Config(vocabulary, width, 3 * width, layers, width // 64, max(1, width // 128), 64, 1e-6, 1e6, True)


def weights_of(model: CausalModel) -> Weights:
    """Return random weights."""
    rng = np.random.default_rng(0)
    return {
        name: torch.from_numpy(rng.standard_normal(shape, dtype=np.float32) * 0.02 + (len(shape) == 1))
        for name, shape in model.shapes.items()
    }


async def measure(model: CausalModel) -> tuple[float, float]:
    """Return the tokens a second of generation and of a prefill."""

    async def inline(function: Callable[..., object], *arguments: object) -> object:
        return function(*arguments)

    engine = TorchEngine(model, run_sync=inline)
    await engine.stage(0, weights_of(model))
    await engine.commit()
    requests = [Request(tuple(range(2, 2 + PROMPT)), bytes([number] * 16)) for number in range(COMPLETIONS)]
    params = SamplingParams(1.0, TOKENS, (0,))
    await engine.generate(requests[:1], params)  # compiles
    start = time.process_time()
    generations = await engine.generate(requests, params)
    middle = time.process_time()
    await engine.forward([item.prompt for item in requests], [item.tokens for item in generations])
    end = time.process_time()
    tokens = sum(len(item.tokens) for item in generations)
    return tokens / (middle - start), tokens / (end - middle)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(f"{'width':>5} {'layers':>6} {'vocabulary':>10}  {'generate':>8} {'exact':>6}  {'prefill':>7} {'exact':>6}")
    for width, layers, vocabulary in ((128, 6, 2048), (512, 8, 16384)):
        size = config(width, layers, vocabulary)
        plain, exact = trio.run(measure, Qwen3(size)), trio.run(measure, ExactQwen3(size))
        print(
            f"{width:>5} {layers:>6} {vocabulary:>10}  {plain[0]:>8.0f} {exact[0]:>6.0f}  "
            f"{plain[1]:>7.0f} {exact[1]:>6.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
