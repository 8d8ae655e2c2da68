"""The kernel for GPUs has the bits of the reference. Triton's interpreter runs it here, on a CPU."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from protocol.rollout import sampling

PROGRAM = """
import json, sys, torch
from protocol.rollout import sampling
from protocol.rollout.gumbel_triton import best_tokens
seed, rows, vocabulary, scale = json.loads(sys.argv[1])
generator = torch.Generator().manual_seed(seed)
logits = torch.randn(rows, vocabulary, generator=generator) * scale
words = torch.randint(0, 1 << 32, (rows, 4), generator=generator)
positions = torch.randint(0, 1 << 17, (rows,), generator=generator)
keys = sampling.noise_keys(words, positions)
print(json.dumps(best_tokens(logits, keys, sampling.noise_table(torch.device("cpu"))).tolist()))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install '.[test]'")
@pytest.mark.parametrize(
    "case", [(1, 4, 1, 1.0), (2, 8, 63, 3.0), (3, 32, 4097, 0.0), (4, 8, 32_000, 2.0), (5, 4, 5000, 1e20)], ids=str
)
def test_the_tokens_are_those_of_the_reference(case: tuple[int, int, int, float]) -> None:
    seed, rows, vocabulary, scale = case
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(case)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * scale
    words = torch.randint(0, 1 << 32, (rows, 4), generator=generator)
    positions = torch.randint(0, 1 << 17, (rows,), generator=generator)
    assert json.loads(result.stdout) == sampling.choose(logits, words, positions, 1.0).tolist()
