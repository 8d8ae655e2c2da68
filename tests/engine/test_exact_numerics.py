"""Exact arithmetic: a policy has the same bits in every batch, on every processor and with any number of threads."""

import os
import random
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grailnode.engine import torch_engine
from grailnode.engine.exact_qwen3 import ExactQwen3, _rotation
from grailnode.engine.qwen3 import Qwen3, Qwen3Config
from grailnode.engine.torch_engine import Forward, TorchEngine
from protocol.encoding import content_digest
from protocol.rollout import sketch
from protocol.rollout.checking import Check, CheckRules
from protocol.rollout.sampling import SamplingParams, log_probabilities, seed_words
from protocol.rollout.sketch import SketchKey
from protocol.rollout.token_choice import choose_with_log_probabilities
from roles.ports import CheckRequest, Generation, Request
from tests.support.builders.policies import RECIPE, engine_of, run_without_waiting


def config() -> Qwen3Config:
    result = Qwen3Config.of(RECIPE.config())
    assert result is not None
    return result


MODEL = ExactQwen3(config())
NUMBERS = np.random.default_rng(0)  # torch's numbers depend on the processor
WEIGHTS = {
    name: torch.from_numpy(NUMBERS.standard_normal(shape) * 0.3 + (len(shape) == 1)).to(torch.bfloat16)
    for name, shape in MODEL.shapes.items()
}
PARAMS = SamplingParams(temperature=0.9, max_tokens=10, stops=(1,))
SEED = bytes(range(32))


def requests(lengths: list[int], seed: int = 0) -> list[Request]:
    generator = random.Random(seed)
    return [Request(tuple(generator.randrange(2, 22) for _ in range(n)), generator.randbytes(16)) for n in lengths]


def engine(batch_tokens: int = 8192) -> TorchEngine:
    exact_engine: TorchEngine = run_without_waiting(engine_of(MODEL, WEIGHTS, max_batch_tokens=batch_tokens))
    return exact_engine


def generate(items: list[Request], batch_tokens: int = 8192) -> list[Generation]:
    """Return completions, generated in batches of so many tokens."""
    return list(run_without_waiting(engine(batch_tokens).generate(items, PARAMS)))


def prefill(items: list[Request], completions: list[tuple[int, ...]], batch_tokens: int = 8192) -> list[Forward]:
    """Return the prefill of completions, in batches of so many tokens."""
    prompts = [item.prompt for item in items]
    return list(run_without_waiting(engine(batch_tokens).forward(prompts, completions)))


def checks(items: list[Request], completions: list[tuple[int, ...]], batch_tokens: int = 8192) -> Check:
    """Return the check of completions, one behind another, in batches of so many tokens."""
    key = SketchKey("projection", SEED)
    requests = [
        CheckRequest(item.prompt, tokens, item.seed, key) for item, tokens in zip(items, completions, strict=True)
    ]
    return Check.join(run_without_waiting(engine(batch_tokens).check(requests, CheckRules(PARAMS))))


def equal(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.numpy().tobytes() == right.numpy().tobytes()


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
    batch_tokens=st.sampled_from([1, 37, 100, 8192]),
    pass_tokens=st.sampled_from([1, 3, 16, 1024]),
    threads=st.sampled_from([1, 2]),
)
def test_batch_padding_passes_and_threads_change_no_bit(
    lengths: list[int], seed: int, batch_tokens: int, pass_tokens: int, threads: int
) -> None:
    items = requests(lengths, seed)
    alone = [generate([item])[0] for item in items]
    completions = [item.tokens for item in alone]
    before, threads_before = torch_engine._PASS_TOKENS, torch.get_num_threads()
    torch_engine._PASS_TOKENS = pass_tokens  # type: ignore[misc]
    torch.set_num_threads(threads)
    try:
        together = generate(items, batch_tokens)
        forwards, check = prefill(items, completions, batch_tokens), checks(items, completions, batch_tokens)
    finally:
        torch_engine._PASS_TOKENS = before  # type: ignore[misc]
        torch.set_num_threads(threads_before)
    for one, other, forward in zip(alone, together, forwards, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == other.logprobs
        assert equal(one.hidden, other.hidden)
        assert equal(one.hidden, forward.hidden)
    assert not check.margins.any()
    assert check.logprobs.tolist() == [value for item in alone for value in item.logprobs]
    own_sketch = b"".join(sketch.commit("projection", item.hidden, SEED) for item in alone)
    assert own_sketch == sketch.rounded(check.sketch)


def test_it_computes_what_the_model_of_the_library_computes_up_to_rounding() -> None:
    items = requests([1, 7, 12])
    completions = [tuple(range(2, 12))] * 3
    plain = run_without_waiting(engine_of(Qwen3(config()), WEIGHTS))
    for exact, rounded in zip(
        prefill(items, completions),
        run_without_waiting(plain.forward([item.prompt for item in items], completions)),
        strict=True,
    ):
        torch.testing.assert_close(exact.hidden, rounded.hidden, rtol=0, atol=1e-4)
        torch.testing.assert_close(exact.logits, rounded.logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_angles_are_those_of_the_formula(theta: float) -> None:
    cosine, sine = _rotation(theta, 64, 4096)
    frequencies = theta ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    angles = (torch.arange(4096, dtype=torch.float64)[:, None] * frequencies).repeat(1, 2)
    torch.testing.assert_close(cosine, angles.cos().float(), rtol=0, atol=1e-7)
    torch.testing.assert_close(sine, angles.sin().float(), rtol=0, atol=1e-7)


def test_generation_and_check_give_equal_log_probabilities_with_a_large_vocabulary() -> None:
    logits = torch.from_numpy(np.random.default_rng(2).standard_normal((300, 1000), dtype=np.float32) * 6)
    seeds = seed_words([bytes([number % 256] * 16) for number in range(300)])
    tokens, logprobs = choose_with_log_probabilities(logits, seeds, torch.arange(300), 0.9)
    assert equal(logprobs, log_probabilities(logits, tokens, 0.9))


@cache
def digest() -> str:
    """Return the digest of all bits that a prefill yields."""
    items = requests([5, 30, 17], seed=3)
    generations = generate(items)
    forwards = prefill(items, [item.tokens for item in generations])
    hidden = torch.cat([forward.hidden for forward in forwards])
    logprobs = [value for item in generations for value in item.logprobs]
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal((40, 200), dtype=np.float32) * 9)
    wide = log_probabilities(logits, torch.arange(40), 0.7)
    tensors = hidden, forwards[0].project(hidden), wide
    parts = [*(tensor.numpy().tobytes() for tensor in tensors), repr(logprobs).encode()]
    return content_digest(b"".join(parts) + sketch.commit("projection", hidden, SEED)).hex()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processor", "torch_kernels"), [("haswell", "avx2"), ("nehalem", "default"), ("skylake-avx512", "avx512")]
)
def test_other_instruction_sets_change_no_bit(processor: str, torch_kernels: str) -> None:
    """Numba keeps what it has compiled for each processor apart, so that the cache serves later runs."""
    variables = {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": "", "ATEN_CPU_CAPABILITY": torch_kernels}
    variables |= {"DNNL_MAX_CPU_ISA": "SSE41"}
    script = "from tests.engine.test_exact_numerics import digest; print(digest())"
    command, environment = [sys.executable, "-c", script], os.environ | variables
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.stdout.strip() == digest(), run.stderr[-500:]
