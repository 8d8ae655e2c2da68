"""Groups, batches and episodes: a group is opened only if its bytes are those of the commitment."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from protocol import limits
from protocol.compression import compress
from protocol.encoding import content_digest, pack, unpack
from protocol.errors import MalformedError
from protocol.rollout.batch import (
    Commitment,
    EpisodeRollout,
    EpisodeRule,
    Group,
    Rollout,
    Turn,
    join_turns,
    open_group,
    pack_tokens,
)
from protocol.run import EpisodeSpec, RunManifest
from tests.support.builders import samples

TOKENS = st.lists(st.integers(0, (1 << 32) - 1), max_size=20)


def commitment_to(*frames: bytes) -> Commitment:
    groups = tuple((content_digest(frame), len(frame)) for frame in frames)
    return samples.commitment(groups, batch=content_digest(b"".join(frames)))


@given(TOKENS, st.lists(st.tuples(TOKENS, st.integers(-(10**12), 10**12)), min_size=1, max_size=5))
def test_a_frame_round_trips(prompt: list[int], rollouts: list[tuple[list[int], int]]) -> None:
    group = samples.group(
        prompt=pack_tokens(prompt),
        rollouts=tuple(
            Rollout(completion=pack_tokens(tokens), sketch=bytes(4 * len(tokens)), reward=reward)
            for tokens, reward in rollouts
        ),
    )
    again = Group.from_frame(group.to_frame())
    assert again == group
    assert again.prompt_tokens == tuple(prompt)
    assert [rollout.tokens for rollout in again.rollouts] == [tuple(tokens) for tokens, _ in rollouts]


def test_a_frame_may_be_compressed_in_any_way() -> None:
    """A digest is that of the frame, so a miner may compress in any way."""
    data = samples.group().to_bytes()
    other = compress(data, level=19)
    assert open_group(other, commitment_to(other), 0) == samples.group()


def test_a_commitment_to_more_than_the_batch_limit_is_invalid() -> None:
    fields = commitment_to(b"frame").model_dump()
    entry = (samples.digest("frame"), limits.MAX_GROUP_BYTES)
    with pytest.raises(ValidationError, match="a batch of"):
        Commitment(**(fields | {"groups": (entry,) * 17}))
    assert Commitment(**(fields | {"groups": (entry,) * 16})).batch_bytes == limits.MAX_BATCH_BYTES


def test_the_largest_commitment_can_be_written() -> None:
    fields = commitment_to(b"frame").model_dump()
    entry = (samples.digest("frame"), limits.MAX_BATCH_BYTES // limits.MAX_GROUPS)
    Commitment(**(fields | {"groups": (entry,) * limits.MAX_GROUPS})).to_bytes()


def test_the_work_digest_depends_on_tokens_only() -> None:
    group = samples.group()
    copy = group.model_copy(update={"miner": samples.VALIDATOR.public, "window": 9, "index": 5})
    assert copy.work_digest() == group.work_digest()
    first, second = group.rollouts
    longer = first.model_copy(update={"completion": first.completion + second.completion[:4]})
    shorter = second.model_copy(update={"completion": second.completion[4:]})
    assert group.model_copy(update={"rollouts": (longer, shorter)}).work_digest() != group.work_digest()
    assert group.model_copy(update={"rollouts": (second, first)}).work_digest() != group.work_digest()


# Records and form of episodes (protocol/rollout/batch.py)


RULES = st.builds(
    EpisodeRule,
    turns=st.integers(1, 6),
    turn_tokens=st.integers(1, 6),
    reply_tokens=st.integers(0, 6),
    tokens=st.integers(1, 40),
    max_tokens=st.integers(1, 24),
    stops=st.sampled_from([(1,), (1, 3)]),
)


def sampled(rule: EpisodeRule, generator: random.Random) -> tuple[tuple[int, ...], tuple[Turn, ...]]:
    """Return an episode as docs/spec/rollout.md says that one is drawn, of random tokens and an environment that ends
    it at random.
    """
    tokens: list[int] = []
    turns: list[Turn] = []
    total = 0
    while room := rule.room(len(turns), len(tokens), total):
        turn: list[int] = []
        while len(turn) < room and not (turn and turn[-1] in rule.stops):
            turn.append(generator.randrange(6))
        reply = tuple(generator.randrange(6) for _ in range(generator.randint(0, rule.reply_tokens)))
        tokens += turn
        ends = generator.random() < 0.2 or not rule.room(len(turns) + 1, len(tokens), total + len(turn) + len(reply))
        turns.append((len(turn), () if ends else reply))
        total += len(turn) + len(turns[-1][1])
        if ends:
            break
    return tuple(tokens), tuple(turns)


def record(tokens: tuple[int, ...], turns: tuple[Turn, ...]) -> EpisodeRollout:
    return EpisodeRollout(
        completion=pack_tokens(tokens),
        sketch=bytes(4 * len(tokens)),
        reward=0,
        turns=tuple((count, pack_tokens(reply)) for count, reply in turns),
    )


@given(rule=RULES, seed=st.integers())
def test_whatever_is_drawn_by_the_rule_has_its_form(rule: EpisodeRule, seed: int) -> None:
    tokens, turns = sampled(rule, random.Random(seed))
    assert rule.is_complete(tokens, turns)
    assert len(turns) <= rule.turns
    assert len(tokens) <= rule.max_tokens
    assert len(join_turns(tokens, turns)[0]) <= rule.tokens


@given(rule=RULES, seed=st.integers())
def test_an_episode_without_its_last_token_or_with_one_more_has_another_form(rule: EpisodeRule, seed: int) -> None:
    tokens, turns = sampled(rule, random.Random(seed))
    *others, (count, _) = turns
    assert not rule.is_complete((*tokens, 5), (*others, (count + 1, ())))
    if count > 1:
        assert not rule.is_complete(tokens[:-1], (*others, (count - 1, ())))
    assert not rule.is_complete(tokens, (*others, (count, (5,))))
    assert not rule.is_complete((), ())


@given(rule=RULES, seed=st.integers())
def test_records_come_back_and_join_turns_in_order(rule: EpisodeRule, seed: int) -> None:
    tokens, turns = sampled(rule, random.Random(seed))
    group = samples.group(0, rollouts=(record(tokens, turns),))
    (rollout,) = Group.from_bytes(group.to_bytes()).rollouts
    assert isinstance(rollout, EpisodeRollout)
    assert (rollout.tokens, rollout.decoded_turns) == (tokens, turns)
    assert tuple(itertools.compress(rollout.sequence, rollout.drawn)) == tokens
    assert len(rollout.sequence) == len(rollout.drawn) == len(tokens) + sum(len(reply) for _, reply in turns)


def test_a_record_is_an_episode_by_its_field_alone() -> None:
    group = samples.group(0, rollouts=(samples.episode_rollout(), samples.rollout(4, 1)))
    assert list(map(type, Group.from_bytes(group.to_bytes()).rollouts)) == [EpisodeRollout, Rollout]
    fields = unpack(group.to_bytes())
    nil = {**fields["rollouts"][0], "turns": None}
    with pytest.raises(MalformedError):
        Group.from_bytes(pack({**fields, "rollouts": (nil,)}))


def test_the_work_digest_covers_turns_and_replies_and_not_the_miner() -> None:
    rollout = samples.episode_rollout()
    (first, reply), last = rollout.turns
    changed = [
        rollout.model_copy(update={"turns": turns})
        for turns in (((1, reply), (2, b"")), ((first, reply[:8]), last), ((first, reply[::-1]), last))
    ]
    groups = [samples.group(0, rollouts=(item,)) for item in (rollout, *changed)]
    digests = {group.work_digest() for group in (*groups, samples.group(0, rollouts=(samples.rollout(2, 1, 3),)))}
    assert len(digests) == 5
    assert groups[0].model_copy(update={"miner": samples.VALIDATOR.public}).work_digest() in digests


def spec(turns: int) -> EpisodeSpec:
    return EpisodeSpec(turns=turns, turn_tokens=4, reply_tokens=8, tokens=64)


def wordle_run(turns: int = 6) -> RunManifest:
    return samples.run_manifest(environment=samples.task(name="wordle"), episode=spec(turns))


def test_a_run_has_episodes_exactly_if_its_environment_plays_them() -> None:
    rule = wordle_run().episode_rule
    assert rule == EpisodeRule(turns=6, turn_tokens=4, reply_tokens=8, tokens=64, max_tokens=8, stops=(1,))
    assert samples.run_manifest().episode_rule is None
    with pytest.raises(ValueError, match="does not play"):
        wordle_run(turns=7)
    with pytest.raises(ValueError, match="does not play"):
        samples.run_manifest(environment=samples.task(name="wordle"), episode=None)
    with pytest.raises(ValueError, match="does not play"):
        samples.run_manifest(episode=wordle_run().episode)


def test_a_reader_takes_the_largest_group_of_a_run() -> None:
    run = samples.run_manifest(environment=samples.task(name="unknown"), group_size=100, episode=spec(turns=10))
    turns = (*[(1, b"1234")] * 9, (1, b""))
    rollout = EpisodeRollout(completion=bytes(40), sketch=bytes(40), reward=-1, turns=turns)
    group = samples.group(0, rollouts=(rollout,) * 100)
    assert run.group_items == 3915 < limits.MAX_GROUP_ITEMS
    assert len(group.to_bytes()) < run.group_bytes
    assert Group.from_bytes(group.to_bytes()) == group
    with pytest.raises(ValueError, match="groups of up to 4215 values"):
        samples.run_manifest(environment=samples.task(name="unknown"), group_size=100, episode=spec(turns=11))
