"""Measure logits in float32 against logits in BF16, in one run: `python -m bench.output_projection`.

A random Qwen3 of two layers whose largest logits are near 23 generates in BF16 in one way, and is checked in another.
`shift` is the difference of the two sides in a token's score, `margin` by how much a chosen token falls short of the
best one. Then the product alone is timed, at the size of Qwen2.5-0.5B's output projection. Each line is a JSON object.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from unittest import mock

import numpy as np
import torch
import trio
from torch import Tensor
from torch.nn import functional

from grailnode.calibration.pairs import CalibrationTask
from grailnode.calibration.variants import Variant, select
from grailnode.engine import output_projection, qwen3
from grailnode.engine.models import build
from grailnode.engine.policy import Policy
from protocol.digest import Weights
from protocol.rollout.sampling import SamplingParams
from tests.support.builders.policies import write_policy
from tests.support.measuring.pair_measurements import measure_pair

PAIRS: Final = "small-batches,alone-checked,eager-checked"
SHAPE: Final = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
VOCABULARY: Final = 151_936
WIDTH: Final = 896

Projection = Callable[[Tensor, Tensor], Tensor]


def rounded(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute logits in the dtype of states and weights."""
    return functional.linear(hidden, weight, bias).to(torch.float32)


PROJECTIONS: Final[dict[str, Projection]] = {"bfloat16": rounded, "float32": output_projection.project}


@contextmanager
def projecting(projection: Projection) -> Iterator[None]:
    """Let the Qwen3 of this repository compute its logits in another way."""
    with mock.patch.object(qwen3, "project", projection):
        yield


def make_weights(policy: Policy) -> Weights:
    """Return random weights whose logits are large and whose layers add little noise."""
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, shape in build(policy).shapes.items():
        scale = 0.7 if name == "lm_head.weight" else 0.02
        values = torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * scale
        weights[name] = values.to(torch.bfloat16)
    return weights


async def measure_margins(groups: int) -> None:
    """Print the shifts and margins of each pair with each projection."""
    with TemporaryDirectory() as folder:
        policy = write_policy(Path(folder), **SHAPE)
        weights = make_weights(policy)
        task = CalibrationTask(policy, SamplingParams(1.0, 64, policy.stops), 8, lambda seed: f"ab{seed[0]}")
        base = Variant(dtype="bfloat16")
        for pair in select(PAIRS, base, base):
            for name, projection in PROJECTIONS.items():
                with projecting(projection):
                    measured = [group async for group in measure_pair(task, pair, weights, groups)]
                shifts = np.concatenate([group.shifts for group in measured])
                margins = np.concatenate([group.margins for group in measured])
                row = {"pair": pair.name, "logits": name, "tokens": len(shifts)}
                row |= {
                    "shift_99": round(float(np.quantile(shifts, 0.99)), 4),
                    "shift_max": round(float(shifts.max()), 4),
                }
                row |= {
                    "margin_share": round(float((margins > 0).mean()), 5),
                    "margin_max": round(float(margins.max()), 4),
                }
                print(json.dumps(row), flush=True)


def measure_seconds() -> None:
    """Print the seconds of a product for one token, a decoding batch, and a piece of a prefill."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(VOCABULARY, WIDTH, generator=generator) * 0.05).to(torch.bfloat16)
    for tokens in (1, 8, 54):
        hidden = torch.randn(tokens, WIDTH, generator=generator).to(torch.bfloat16)
        seconds = {
            name: min(_timed(projection, hidden, weight) for _ in range(3)) for name, projection in PROJECTIONS.items()
        }
        ratio = seconds["float32"] / seconds["bfloat16"]
        print(json.dumps({"tokens": tokens, **{k: round(v, 4) for k, v in seconds.items()}, "ratio": round(ratio, 2)}))


def _timed(projection: Projection, hidden: Tensor, weight: Tensor) -> float:
    begin = time.perf_counter()
    with torch.inference_mode():
        projection(hidden, weight)
    return time.perf_counter() - begin


def main() -> None:
    """Parse the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=12, help="of 8 rollouts, for each pair")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    trio.run(measure_margins, arguments.groups)
    measure_seconds()


if __name__ == "__main__":
    main()
