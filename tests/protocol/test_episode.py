"""Records and form of episodes (protocol/rollout/episode.py, batch.py)."""

import random
from itertools import compress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from protocol.encoding import pack, unpack
from protocol.errors import MalformedError, ProtocolError
from protocol.rollout.batch import EpisodeRollout, Group, Rollout, join_turns, pack_tokens
from protocol.rollout.episode import EpisodeRule, Turn
from protocol.run import EpisodeSpec, RunManifest
from tests.support.builders import samples

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
    assert tuple(compress(rollout.sequence, rollout.drawn)) == tokens
    assert len(rollout.sequence) == len(rollout.drawn) == len(tokens) + sum(len(reply) for _, reply in turns)


@given(data=st.binary(max_size=200), place=st.integers(0, 400), bit=st.integers(0, 7))
def test_hostile_bytes_give_a_group_of_the_same_bytes_or_an_error(data: bytes, place: int, bit: int) -> None:
    whole = bytearray(samples.group(0, rollouts=(samples.episode_rollout(),)).to_bytes())
    whole[place % len(whole)] ^= 1 << bit
    for hostile in (bytes(whole), data):
        try:
            group = Group.from_bytes(hostile)
        except ProtocolError:
            continue
        assert group.to_bytes() == hostile


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
