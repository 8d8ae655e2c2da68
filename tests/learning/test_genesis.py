"""The packaged genesis: its files and weights, and that its recipe is reproducible (it is not run in full here)."""

import itertools
import statistics
from pathlib import Path

import pytest
import torch

from grailnode.engine.models import build
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from protocol import environments
from protocol.digest import digest_weights
from protocol.rollout.sampling import SamplingParams
from roles.ports import Request
from tests.support.builders import genesis
from tests.support.builders.policies import engine_of, run_without_waiting

TINY = genesis.Recipe(
    width=16, layers=1, heads=2, key_value_heads=1, head_size=8, feed_forward=16, steps=30, batch=16, warmup=5
)


def test_packaged_files() -> None:
    files = {path.name: path.stat().st_size for path in PACKAGED_POLICY.iterdir()}
    assert set(files) == {"config.json", "tokenizer.json", "model.safetensors", "proof.json"}
    assert sum(files.values()) < 3_000_000


def test_packaged_weights() -> None:
    weights = load_weights(PACKAGED_POLICY)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == build(Policy.load(PACKAGED_POLICY)).shapes
    assert digest_weights(weights).hex() == PACKAGED_DIGEST, "not what tests.support.builders.genesis makes"


def test_config_and_tokenizer_are_those_of_the_recipe() -> None:
    assert Policy.load(PACKAGED_POLICY).config == genesis.Recipe().config()
    assert (PACKAGED_POLICY / "tokenizer.json").read_text() == genesis.tokenizer()


def test_the_packaged_policy_is_right_about_half_the_time() -> None:
    """It forgets to carry in most cases, and is right often enough to be reinforced."""
    policy, addition = Policy.load(PACKAGED_POLICY), environments.get("addition")
    engine = run_without_waiting(engine_of(build(policy), load_weights(PACKAGED_POLICY)))
    problems = [addition.held_out_problem(index) for index in range(200)]
    prompts = [policy.tokenizer.encode(problem.prompt) for problem in problems]
    params = SamplingParams(1.0, 5, policy.stops)
    likely = [Request(prompt, b"") for prompt in prompts]
    sampled = [Request(prompt, index.to_bytes(16, "little")) for index, prompt in enumerate(prompts)]
    for requests, low, high in ((likely, 0.2, 0.6), (sampled, 0.35, 0.75)):
        answers = run_without_waiting(engine.generate(requests, params))
        texts = [policy.tokenizer.decode(answer.tokens[:-1]) for answer in answers]
        accuracy = statistics.fmean(
            addition.reward(problem, text) for problem, text in zip(problems, texts, strict=True)
        )
        assert low < accuracy < high


@pytest.mark.parametrize("name", ["addition", "countdown"])
def test_the_tokenizer_covers_every_prompt_of(name: str) -> None:
    tokenizer = Policy.load(PACKAGED_POLICY).tokenizer
    for index in range(50):
        prompt = environments.get(name).held_out_problem(index).prompt
        assert tokenizer.decode(tokenizer.encode(prompt)) == prompt
        assert len(tokenizer.encode(prompt)) == len(prompt)


@pytest.mark.parametrize(("a", "b", "wrong"), [(57, 68, 15), (31, 42, 73), (90, 20, 10), (50, 50, 0), (19, 23, 32)])
def test_sum_without_carry(a: int, b: int, wrong: int) -> None:
    assert genesis.carryless_sum(a, b) == wrong


def test_the_corpus_depends_on_the_seed_and_has_no_held_out_problems() -> None:
    def beginning(seed: int) -> torch.Tensor:
        return torch.cat([batch.ids[:, :6] for batch in itertools.islice(genesis.corpus(genesis.Recipe(), seed), 4)])

    assert torch.equal(beginning(0), beginning(0))
    assert not torch.equal(beginning(0), beginning(1))
    addition, tokenizer = environments.get("addition"), Policy.load(PACKAGED_POLICY).tokenizer
    held_out = {tokenizer.encode(addition.held_out_problem(index).prompt) for index in range(1000)}
    assert not held_out & {tuple(row) for row in beginning(0).tolist()}


def test_a_small_recipe_is_reproducible_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    one, other = genesis.make(TINY, 3, progress=True), genesis.make(TINY, 3)
    assert digest_weights(one) == digest_weights(other)
    assert digest_weights(genesis.make(TINY, 4)) != digest_weights(one)
    last = float(capsys.readouterr().out.split()[-1])
    assert last < 3.2  # a uniform guess over the vocabulary costs ln 32 = 3.47


def test_the_command_writes_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(genesis, "Recipe", lambda: TINY)
    monkeypatch.setattr("sys.argv", ["genesis", "--seed", "3", "--out", str(tmp_path / "made")])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    genesis.main()
    assert digest_weights(load_weights(tmp_path / "made")) == digest_weights(genesis.make(TINY, 3))
    assert Policy.load(tmp_path / "made").vocabulary == 32


PACKAGED_DIGEST = "df1107d62568293beb59258a70991e56e10510daeac9ea6035b6119d4892b581"
