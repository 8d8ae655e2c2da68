"""Playing episodes with an engine: turns in batches, room, replies as tokens, and evaluations."""

import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grailnode.engine.draft_engine import DraftEngine
from grailnode.engine.hf import TransformersModel
from grailnode.engine.models import build, build_exact
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.engine.torch_engine import TorchEngine
from protocol import limits
from protocol.digest import Weights
from protocol.rollout import challenge
from protocol.rollout.sampling import SamplingParams
from protocol.run import ChatSpec, EpisodeSpec, EvaluationSpec, SamplingSpec
from roles.policy.assignment import Task
from roles.policy.causal_model import CausalModel
from roles.policy.episodes import OpenEpisode, PlayedEpisode, encode_reply, play
from roles.ports import EngineError, Generation, Request
from roles.validator.evaluation import evaluate
from tests.support.builders import samples
from tests.support.builders.dice import Dice
from tests.support.builders.policies import NOISE, inline, run_without_waiting
from tests.support.measuring.wrapped_model import WrappedModel

POLICY = Policy.load(PACKAGED_POLICY)
MODEL = build(POLICY)
TOKENIZER = POLICY.tokenizer


def new_task(*, samples_of_problem: int = 0, max_tokens: int = 10, **episode: int) -> Task:
    fields = {"turns": 6, "turn_tokens": 3, "reply_tokens": 8, "tokens": 60, **episode}
    run = samples.run_manifest(
        environment=samples.task(name="dice"),
        sampling=SamplingSpec(temperature=5.0, max_tokens=max_tokens, stops=POLICY.stops),
        episode=EpisodeSpec(**fields),
        evaluation=EvaluationSpec(problems=4, samples=samples_of_problem, pass_at=1),
    )
    return Task(bytes(32), run, Dice(), TOKENIZER, POLICY.vocabulary, inline)


class CountingEngine(TorchEngine):
    """A torch engine that records how many requests each call has, and of how many the tokens are kept behind it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.calls: list[int] = []
        self.kept: list[list[Request]] = []

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        self.calls.append(len(requests))
        generations = await super().generate(requests, params)
        self.kept.append([item for item in requests if item.turn_cache and item.turn_cache.content])
        return generations


def served(engine: TorchEngine) -> Any:
    run_without_waiting(engine.stage(0, load_weights(PACKAGED_POLICY)))
    run_without_waiting(engine.commit())
    return engine


def new_engine() -> CountingEngine:
    engine: CountingEngine = served(CountingEngine(MODEL, run_sync=inline))
    return engine


def new_episodes(task: Task, count: int = 12) -> list[PlayedEpisode]:
    problem = task.environment.problem(bytes(32))
    seeds = [random.Random(number).randbytes(16) for number in range(count)]
    return [PlayedEpisode(OpenEpisode(task, problem, seed), task.prompt(problem), seed) for seed in seeds]


def test_episodes_are_played_together_as_each_alone() -> None:
    task, engine = new_task(), new_engine()
    together, alone = new_episodes(task), new_episodes(task)
    run_without_waiting(play(task, engine, together))
    turns = max(len(item.episode.turns) for item in together)
    assert len(engine.calls) == turns >= 4
    assert engine.calls == sorted(engine.calls, reverse=True)
    rule = task.run.episode_rule
    assert rule is not None
    for one, other in zip(together, alone, strict=True):
        run_without_waiting(play(task, engine, [other]))
        assert (one.episode.tokens, one.episode.turns) == (other.episode.tokens, other.episode.turns)
        assert rule.is_complete(one.episode.tokens, one.episode.turns)
        generation = one.generation
        assert len(generation.tokens) == len(generation.hidden) == len(generation.logprobs)
    # 10 policy tokens leave a single one for a fourth turn, which is cut off there.
    assert any(len(item.episode.tokens) == 10 and item.episode.turns[-1][0] < 3 for item in together)


class CountingModel(WrappedModel):
    """A model that counts the tokens that it computes, without pads."""

    tokens = 0

    def hidden(self, weights: Weights, ids: Tensor, mask: Tensor, cache: Any = None) -> Tensor:
        self.tokens += int(mask[:, -ids.shape[1] :].sum())
        return super().hidden(weights, ids, mask, cache)


class ForgetfulEngine(TorchEngine):
    """An engine that keeps nothing of a turn."""

    async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
        return await super().generate([replace(request, turn_cache=None) for request in requests], params)


@pytest.mark.parametrize("make_model", [build, build_exact, lambda policy: TransformersModel(policy.directory)])
def test_each_token_is_computed_once_and_gives_what_a_whole_prefill_gives(
    make_model: Callable[[Policy], CausalModel],
) -> None:
    task, model = new_task(max_tokens=18), CountingModel(make_model(POLICY))
    kept, whole = new_episodes(task), new_episodes(task)
    run_without_waiting(play(task, served(TorchEngine(model, run_sync=inline)), kept))
    # Nothing is computed from the last token of an episode.
    sequences = [item.request(None).prompt for item in kept]
    assert model.tokens == sum(len(sequence) - 1 for sequence in sequences)
    run_without_waiting(play(task, served(ForgetfulEngine(model, run_sync=inline)), whole))
    for one, other in zip(kept, whole, strict=True):
        assert (one.episode.tokens, one.episode.turns) == (other.episode.tokens, other.episode.turns)
        atol = 0.0 if model.exact else NOISE
        torch.testing.assert_close(one.generation.hidden, other.generation.hidden, rtol=0, atol=atol)


def test_drafts_go_on_behind_what_a_turn_has_computed() -> None:
    task = new_task()
    drafted, plain = new_episodes(task), new_episodes(task)
    run_without_waiting(play(task, served(DraftEngine(MODEL, run_sync=inline)), drafted))
    run_without_waiting(play(task, served(ForgetfulEngine(MODEL, run_sync=inline)), plain))
    for one, other in zip(drafted, plain, strict=True):
        assert (one.episode.tokens, one.episode.turns) == (other.episode.tokens, other.episode.turns)
        torch.testing.assert_close(one.generation.hidden, other.generation.hidden, rtol=0, atol=NOISE)


def test_the_tokens_that_are_kept_are_no_more_than_a_batch() -> None:
    task, engine = new_task(), served(CountingEngine(MODEL, run_sync=inline, max_batch_tokens=100))
    for _ in range(2):  # what was kept for a play that ended leaves its room to the next one
        engine.calls, engine.kept = [], []
        run_without_waiting(play(task, engine, episodes := new_episodes(task)))
        assert all(0 < sum(len(request.prompt) for request in kept) <= 100 for kept in engine.kept)
        assert len(engine.kept[1]) < engine.calls[1]
        caches = [item.request(None).turn_cache for item in episodes]
        assert not any(cache.content for cache in caches if cache is not None)


def test_an_episode_ends_where_its_reply_leaves_no_room() -> None:
    task = new_task(tokens=14)
    episodes = new_episodes(task)
    run_without_waiting(play(task, new_engine(), episodes))
    for item in episodes:
        total = len(item.episode.tokens) + sum(len(reply) for _, reply in item.episode.turns)
        assert total <= 14
        assert item.episode.turns[-1][1] == ()


def test_another_version_ends_the_play() -> None:
    task = new_task()

    class Swapping(CountingEngine):
        async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
            generations = await super().generate(requests, params)
            await self.stage(len(self.calls), load_weights(PACKAGED_POLICY))
            await self.commit()
            return generations

    engine = Swapping(MODEL, run_sync=inline)
    run_without_waiting(engine.stage(0, load_weights(PACKAGED_POLICY)))
    run_without_waiting(engine.commit())
    with pytest.raises(EngineError, match="another version"):
        run_without_waiting(play(task, engine, new_episodes(task)))


CHAT = ChatSpec(template=bytes(32), system="", before="", after="", trim=False, turn_before="(", turn_after=")=")


@pytest.mark.parametrize(
    ("chat", "text", "most", "expected"),
    [
        (None, "12+3", 8, "12+3"),
        (None, "12+3", 3, "12+"),
        (None, "", 3, ""),
        (CHAT, "12+3", 8, "(12+3)="),
        (CHAT, "12+34567", 8, "(12+34)="),  # the text behind a reply stays
        (CHAT, "12", 3, "()="),
        (CHAT, "12", 1, ")"),
    ],
)
def test_replies_as_tokens(chat: ChatSpec | None, text: str, most: int, expected: str) -> None:
    tokens = encode_reply(TOKENIZER, chat, text, most)
    assert TOKENIZER.decode(tokens) == expected
    assert len(tokens) <= most


def test_a_long_reply_is_cut_between_two_characters() -> None:
    class Letters:
        def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
            return tuple(map(ord, text))

        def decode(self, tokens: tuple[int, ...]) -> str:
            return "".join(map(chr, tokens))

    whole = encode_reply(Letters(), None, "a" + "é" * limits.MAX_REPLY_BYTES, limits.MAX_REPLY_TOKENS)
    assert len(whole) == 1 + (limits.MAX_REPLY_BYTES - 1) // 2
    assert whole[-1] == ord("é")
    assert encode_reply(Letters(), None, "\ud800", 4) == (ord("?"),)


def test_the_states_of_the_most_likely_tokens_end_with_their_turn() -> None:
    task, states = new_task(), list[weakref.ref[Tensor]]()

    class Engine(TorchEngine):
        async def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[Generation]:
            generations = await super().generate(requests, params)
            states.extend(weakref.ref(item.hidden) for item in generations)
            return generations

    problem = task.environment.problem(bytes(32))
    episodes = [PlayedEpisode(OpenEpisode(task, problem, bytes([n]) * 32), (5, 6), b"") for n in range(3)]
    run_without_waiting(play(task, served(Engine(MODEL, run_sync=inline)), episodes))
    assert states
    assert not any(state() is not None for state in states)


@pytest.mark.parametrize("samples_of_problem", [0, 3])
def test_an_evaluation_plays_episodes(samples_of_problem: int) -> None:
    task = new_task(samples_of_problem=samples_of_problem)
    evaluations = [run_without_waiting(evaluate(task, new_engine(), 5)) for _ in range(2)]
    assert evaluations[0] == evaluations[1]
    (stratum,) = evaluations[0].strata
    assert (stratum.problems, len(stratum.right)) == (4, max(1, samples_of_problem) + 1)
    assert isinstance(task.environment, Dice)
    seeds = {seed for seed, _ in task.environment.steps}
    assert challenge.episode_seed(challenge.evaluation_seed(task.run_id, 5, 0, 0), 0) in seeds
    assert len(seeds) == 4 * max(1, samples_of_problem)
