"""The packaged genesis: its files and weights, and that its recipe is reproducible (it is not run in full here)."""

import statistics

import pytest

from grailnode.engine.models import build
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from protocol import environments
from protocol.digest import digest_weights
from protocol.rollout.sampling import SamplingParams
from roles.ports import Request
from tests.support.builders import genesis
from tests.support.builders.policies import engine_of, run_without_waiting


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


PACKAGED_DIGEST = "df1107d62568293beb59258a70991e56e10510daeac9ea6035b6119d4892b581"
