"""Whether vLLM computes with the weights as they were written: its states and draws beside those of the torch model.

Reading tensors back proves that their bytes lie where the tensor map says, but the map wrote them, too. A kernel that
reads them in another order, such as one for experts whose gate and up projections are exchanged, would pass. So a few
tokens are generated after the first commit and after each restart, and their states are computed again with torch.

How much two right computations may differ depends on a model's layers. The measure is how far the torch model's own
states move when the last bit of each number in its table of tokens is changed: that is 1.3 to 2 times the difference
between BF16 and float32 for models of 2 and 28 layers, dense and with experts (docs/adr/0351). The torch model computes
in BF16 with weights mapped from the checkpoint's file, so the check needs no memory for a second copy of them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from grailnode.engine.lora_model import LoraModel
from protocol.rollout.sampling import SamplingParams, log_probabilities
from roles.policy.causal_model import CausalModel
from roles.policy.sequences import Tokens
from roles.ports import EngineError, Generation, Request

PARAMS: Final = SamplingParams(temperature=1.0, max_tokens=4, stops=())
"""Of the completions that are compared."""

_PROMPTS, _PROMPT_TOKENS = 8, 6
_FACTOR: Final = 4.0  # allowed differences, as multiples of the model's own sensitivity
_MOST: Final = 0.7  # the largest allowed difference; states that have nothing in common differ by about 1.4


def probes(vocabulary: int) -> list[Request]:
    """Return the prompts that are completed: tokens spread over the vocabulary."""
    ids = torch.randint(vocabulary, (_PROMPTS, _PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    return [Request(tuple(prompt), bytes([number] * 16)) for number, prompt in enumerate(ids.tolist())]


def check_layout(
    model: CausalModel, checkpoint: Path, prompts: Sequence[Tokens], results: Sequence[Generation]
) -> None:
    """Raise EngineError if the torch model computes something else from a safetensors file in BF16 than an engine did,
    whose completions of the prompts, each of as many tokens, have their hidden states.
    """
    with torch.inference_mode():
        weights = load_file(checkpoint)
        if isinstance(model, LoraModel):
            model, weights = model.inner(weights)
        ids = torch.tensor([prompt + result.tokens[:-1] for prompt, result in zip(prompts, results, strict=True)])
        tokens = torch.tensor([result.tokens for result in results])
        served = torch.stack([result.hidden for result in results]).to(torch.bfloat16)

        def hidden(changed: dict[str, Tensor]) -> Tensor:
            states = model.hidden(weights | changed, ids, torch.ones_like(ids, dtype=torch.bool))
            return states[:, -tokens.shape[1] :]

        expected = hidden({})
        allowed = min(_MOST, _FACTOR * _difference(hidden(_last_bits_changed(weights, model.vocabulary)), expected))
        # From the engine's own states, so that a fault in the layers is not counted twice.
        logits = model.logits(weights, served)
        likely = log_probabilities(logits.flatten(0, 1), tokens.flatten(), PARAMS.temperature)
        reported = torch.tensor([result.logprobs for result in results]).flatten()
    differences = {
        "its hidden states": _difference(served, expected),
        "its log-probabilities, in units of the logits' spread": float(
            ((likely - reported).abs() / logits.flatten(0, 1).std(dim=-1)).median()
        ),
    }
    for what, difference in differences.items():
        if not difference <= allowed:
            raise EngineError(
                f"vLLM computes something else than the torch model with the same weights: {what} differ by "
                f"{difference:.2g}, and by {allowed:.2g} at most if both are right. One of its kernels reads the "
                "weights in another layout: choose another one by [engine] flags, or remove [engine] to compute with "
                "torch"
            )


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the median over positions of how far states [..., D] lie apart, as a share of their length."""
    # The median, because near ties of experts are decided otherwise at single positions of honest computations.
    distances = (one.float() - other.float()).norm(dim=-1) / other.float().norm(dim=-1)
    return float(distances.median())


def _last_bits_changed(weights: Mapping[str, Tensor], vocabulary: int) -> dict[str, Tensor]:
    """Return the tables of tokens with the last bit of each number changed: the smallest change of all inputs."""
    tables = {name: tensor for name, tensor in weights.items() if tensor.shape[0] == vocabulary and tensor.dim() == 2}
    return {name: (tensor.view(torch.int16) ^ 1).view(torch.bfloat16) for name, tensor in tables.items()}
