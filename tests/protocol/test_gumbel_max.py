"""The compiled search for the best score, the kernel for GPUs and the choice of tokens give the reference's bits."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from protocol.rollout import sampling
from protocol.rollout.filters import EVERY_TOKEN, Filters
from protocol.rollout.token_choice import choose_with_log_probabilities
from tests.support.builders.samples import seeds

LENGTHS = (13, 0, 1, 34)
ROWS = sum(LENGTHS)


def best_of(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores of the tokens, and the best scores by torch and by the compiled search."""
    words, positions = sampling.token_places(seeds(len(LENGTHS)), LENGTHS)
    own = (logits + sampling.noise(words, positions, logits.shape[-1])).gather(-1, tokens[:, None]).squeeze(-1)
    fast, _ = sampling.search_on_cpu(logits, words, positions, own)
    return own, sampling._best(logits, words, positions, own), fast


@pytest.mark.parametrize("vocabulary", [1, 7, 1024, 1025, 5000])
@pytest.mark.parametrize("sharpness", [0.1, 3.0, 30.0])
def test_both_give_the_same_scores(vocabulary: int, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(ROWS, vocabulary, generator=generator) * sharpness
    tokens = torch.randint(vocabulary, (ROWS,), generator=generator)
    tokens[::2] = logits[::2].argmax(dim=-1)
    own, slow, fast = best_of(logits, tokens)
    assert torch.equal(slow, fast)
    assert (fast >= own).all()


def test_both_give_the_same_scores_for_nan_and_infinite_logits() -> None:
    logits = torch.randn(ROWS, 50, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(ROWS)
    logits[0, 5] = logits[1, 1] = math.nan
    logits[2] = logits[3, 3] = -math.inf
    logits[4, 9] = math.inf
    _, slow, fast = best_of(logits, tokens)
    assert torch.equal(slow.nan_to_num(nan=-1.0), fast.nan_to_num(nan=-1.0))


def test_no_token_with_the_best_score_is_excluded() -> None:
    """`contenders` bounds the noise of a word. Here each of 300,000 tokens has the best score by a minimal amount."""
    words = sampling.seed_words(seeds(1))
    vocabulary = 300_000
    noises = sampling.noise(words[0], torch.tensor(0), vocabulary)
    order = noises.argsort()[:: vocabulary // ROWS][:ROWS]
    order[-1] = noises.argmax()
    logits = torch.full((len(order), vocabulary), -math.inf)
    rows = torch.arange(len(order))
    logits[rows, order] = torch.nextafter(-noises[order], torch.tensor(math.inf)) + 1e-6
    logits[rows, 0] = -noises[0]
    own = logits[:, 0] + noises[0]
    best, _ = sampling.search_on_cpu(logits, words.repeat(len(order), 1), torch.zeros_like(order), own)
    assert ((best > own) | (order == 0)).all()


@pytest.mark.parametrize("vocabulary", [1, 63, 64, 65, 2048, 150_001])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 30.0, 1e30])
def test_log_probabilities_are_as_exact_as_float32_allows(vocabulary: int, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(8, vocabulary, generator=generator) * sharpness
    logits[0, 0] = -math.inf if vocabulary > 1 else 0.0
    tokens = torch.randint(vocabulary, (8,), generator=generator)
    result = sampling.log_probabilities(logits, tokens, 1.0)
    exact = logits.double().log_softmax(dim=-1).gather(-1, tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(result.double(), exact, rtol=2e-7, atol=2e-6)


def test_rows_with_nan_have_nan_as_log_probability() -> None:
    logits = torch.randn(4, 130, generator=torch.Generator().manual_seed(0))
    logits[0, 3] = logits[1, 129] = math.nan
    logits[2] = -math.inf
    result = sampling.log_probabilities(logits, torch.zeros(4, dtype=torch.int64), 1.0)
    assert result.isnan().tolist() == [True, True, True, False]


# The kernel for GPUs has the bits of the reference. Triton's interpreter runs it here, on a CPU.


PROGRAM = """
import json, sys, torch
from protocol.rollout import sampling
from protocol.rollout.gumbel_triton import best_tokens
for seed, rows, vocabulary, scale in json.loads(sys.argv[1]):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * scale
    words = torch.randint(0, 1 << 32, (rows, 4), generator=generator)
    positions = torch.randint(0, 1 << 17, (rows,), generator=generator)
    keys = sampling.noise_keys(words, positions)
    print(json.dumps(best_tokens(logits, keys, sampling.noise_table(torch.device("cpu"))).tolist()))
"""
CASES = ((1, 4, 1, 1.0), (2, 8, 63, 3.0), (3, 32, 4097, 0.0), (4, 8, 32_000, 2.0), (5, 4, 5000, 1e20))


def run_python(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", program, *arguments]
    environment = os.environ | {"PYTHONPATH": path} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install '.[test]'"
)


@needs_triton
def test_the_tokens_are_those_of_the_reference() -> None:
    result = run_python(PROGRAM, json.dumps(CASES), TRITON_INTERPRET="1")
    for case, line in zip(CASES, result.stdout.splitlines(), strict=True):
        seed, rows, vocabulary, scale = case
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(rows, vocabulary, generator=generator) * scale
        words = torch.randint(0, 1 << 32, (rows, 4), generator=generator)
        positions = torch.randint(0, 1 << 17, (rows,), generator=generator)
        assert json.loads(line) == sampling.choose(logits, words, positions, 1.0).tolist(), case


COMPILATION = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from protocol.rollout.gumbel_triton import _block_best
pointers = {"scaled": "*fp32", "keys": "*i64", "others": "*i64", "table": "*i64", "scores": "*fp32", "tokens": "*i64"}
signature = pointers | {"vocabulary": "i32", "BLOCK": "constexpr"}
source = ASTSource(fn=_block_best, signature=signature, constexprs={"BLOCK": 2048})
for architecture in (80, 90, 120):
    print(len(triton.compile(source, target=GPUTarget("cuda", architecture, 32)).asm["cubin"]) > 0)
"""


@needs_triton
def test_the_kernel_compiles_for_gpus(tmp_path: Path) -> None:
    """The interpreter takes names of Python that the compiler refuses."""
    result = run_python(COMPILATION, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert result.stdout.split() == ["True"] * 3, result.stderr


# Triton is used only where it can compile, which is tried once


CPU = torch.device("cpu")
TRIAL = "import torch; from protocol.rollout.sampling import triton_fault; print(triton_fault(torch.device('cpu')))"


@needs_triton
@pytest.mark.parametrize(("interpreted", "fault"), [("1", "\n"), ("0", "Triton cannot compile the kernel that draws")])
def test_triton_is_tried_by_the_kernel_itself(interpreted: str, fault: str) -> None:
    """Its interpreter stands for a machine where it works; without, it finds no GPU here."""
    result = run_python(TRIAL, TRITON_INTERPRET=interpreted, CUDA_VISIBLE_DEVICES="")
    assert result.stdout.startswith(fault), result.stderr
    assert result.stdout.count("\n") == 1


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Have Triton fail as without a C compiler; the list gets an item for each time that it is tried."""
    attempts: list[int] = []

    def fail(*_: object) -> Tensor:
        attempts.append(1)
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable\nor set something.")

    monkeypatch.setattr(sampling, "best_tokens_on_gpu", fail)
    sampling.triton_fault.cache_clear()
    yield attempts
    sampling.triton_fault.cache_clear()


def test_a_missing_compiler_is_found_once_and_explained_in_a_line(trials: list[int]) -> None:
    line = sampling.triton_fault(CPU)
    assert "(Failed to find C compiler. Please specify via CC environment variable)" in line
    assert "torch draws the same tokens, more slowly: install gcc" in line
    assert "TRITON_CACHE_DIR" in line
    assert "\n" not in line
    assert sampling.triton_fault(CPU) == line
    assert trials == [1]


# The compiled choice of tokens gives the bits of the reference, whatever the logits


FILTERS = [EVERY_TOKEN, Filters(top_k=5), Filters(top_p=0.7), Filters(min_p=0.05), Filters(50, 0.9, 0.01)]


def rows(count: int, vocabulary: int, seed: int, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random logits, seed words and positions."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, vocabulary, generator=generator) * scale
    words = torch.randint(0, 1 << 32, (count, 4), generator=generator)
    return logits, words, torch.randint(0, 1 << 17, (count,), generator=generator)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("vocabulary", [1, 63, 64, 65, 1000, 32_000])
def test_the_choice_is_that_of_the_reference(vocabulary: int, temperature: float, filters: Filters) -> None:
    logits, words, positions = rows(64 if vocabulary < 10_000 else 8, vocabulary, vocabulary)
    tokens, log_probabilities = choose_with_log_probabilities(logits, words, positions, temperature, filters)
    assert torch.equal(tokens, sampling.choose(logits, words, positions, temperature, filters))
    expected = sampling.log_probabilities(logits, tokens, temperature, filters)
    torch.testing.assert_close(log_probabilities, expected, rtol=0, atol=2e-5)


@given(st.integers(0, 2**31), st.integers(1, 200), st.floats(0.0, 1e30), st.sampled_from(FILTERS))
def test_any_logits_and_seeds_give_the_tokens_of_the_reference(
    seed: int, vocabulary: int, scale: float, filters: Filters
) -> None:
    logits, words, positions = rows(4, vocabulary, seed, scale)
    tokens, _ = choose_with_log_probabilities(logits, words, positions, 1.0, filters)
    assert torch.equal(tokens, sampling.choose(logits, words, positions, 1.0, filters))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_logits_that_are_no_numbers_give_the_token_of_the_reference(value: float) -> None:
    logits, words, positions = rows(3, 200, 2)
    logits[1] = value
    tokens, _ = choose_with_log_probabilities(logits, words, positions, 1.0)
    assert torch.equal(tokens, sampling.choose(logits, words, positions, 1.0))


def test_greedy_takes_the_largest_logit() -> None:
    logits, _, positions = rows(8, 500, 3)
    tokens, log_probabilities = choose_with_log_probabilities(logits, None, positions, 1.0)
    assert torch.equal(tokens, logits.argmax(dim=-1))
    torch.testing.assert_close(log_probabilities, logits.log_softmax(-1).amax(-1), rtol=0, atol=1e-5)
