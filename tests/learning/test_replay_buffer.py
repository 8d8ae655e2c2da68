"""The replay buffer: its bounds, its draws, and that every group is stored once, or for a reason not at all."""

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from roles.trainer.learn.replay_buffer import ReplayBuffer, ReplayState
from roles.trainer.learn.training_settings import ReplaySettings
from tests.support.processes.ranks import group


def _buffer(**settings: float) -> ReplayBuffer:
    return ReplayBuffer(ReplaySettings(**settings), seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("filtering", [True, False])
def test_groups_with_equal_rewards_are_not_stored_with_filtering(filtering: bool) -> None:
    buffer = _buffer(dynamic_filtering=filtering)
    assert buffer.add(group("a", rewards=(1.0, 1.0))) is not filtering
    assert len(buffer) == (not filtering)


@given(st.floats(0.05, 1.0), st.integers(0, 8), st.integers(0, 8))
def test_the_odds_of_two_groups_are_their_staleness_weights(decay: float, first: int, second: int) -> None:
    """A group of staleness s is drawn first with probability decay**s over the sum of both weights."""
    draws, expected = 200, decay**first / (decay**first + decay**second)
    hits = 0
    buffer = _buffer(decay=decay, max_uses=10**9, max_staleness=8)
    buffer.add(group("first", version=8 - first))
    buffer.add(group("second", version=8 - second, prompt=(5, 6)))
    buffer.advance(8)
    for _ in range(draws):
        (sample,) = buffer.draw(1)
        hits += sample.prompt_tokens == (5, 6, 7)
    deviation = math.sqrt(draws * expected * (1 - expected))
    assert abs(hits - draws * expected) <= 6 * deviation + 1


def test_a_lower_version_is_refused() -> None:
    buffer = _buffer()
    buffer.advance(3)
    with pytest.raises(ValueError, match="after 3"):
        buffer.advance(2)


@given(st.integers(0, 30), st.integers(0, 12))
def test_a_restored_buffer_draws_what_the_saved_one_draws(count: int, draws: int) -> None:
    settings = ReplaySettings(max_uses=2)
    one, other = ReplayBuffer(settings, seed=1), ReplayBuffer(settings, seed=2)
    for index in range(count):
        one.add(group(index, version=index % 5))
    one.advance(6)
    one.draw(draws)
    assert other.restore(one.freeze([b"b" * 32, b"a" * 32])()) == (b"a" * 32, b"b" * 32)
    assert other.size == one.size
    for _ in range(3):
        assert one.draw(5) == other.draw(5)


def test_a_damaged_state_is_refused_and_changes_nothing() -> None:
    first_buffer, buffer = _buffer(), _buffer()
    first_buffer.add(group("a"))
    buffer.add(group("b"))
    state = ReplayState.from_bytes(first_buffer.freeze()())
    cut_group = state.groups[0][0][1:], 0
    damaged = [state.model_copy(update=change) for change in ({"random_words": (1,)}, {"groups": (cut_group,)})]
    for data in (b"", state.to_bytes()[1:], *(one.to_bytes() for one in damaged)):
        with pytest.raises(ValueError, match=r"replay|state vector"):
            buffer.restore(data)
    assert buffer.draw(9) == [group("b")]


class BufferMachine(RuleBasedStateMachine):
    """Whatever is added, drawn, published and restored, groups come and go for a reason, and the bounds hold."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = ReplaySettings(replay_bytes=8 * group("x").size, max_staleness=3, max_uses=2, decay=0.6)
        self.buffer = ReplayBuffer(self.settings, seed=0)
        self.version = 0
        self.stored: dict[bytes, int] = {}  # versions of the groups that the buffer should have
        self.offered = 0
        self.uses: Counter[tuple[bytes, int]] = Counter()  # by digest and version

    @rule(behind=st.integers(0, 5), informative=st.booleans())
    def add(self, behind: int, informative: bool) -> None:
        rewards = (1.0, 0.0) if informative else (0.0, 0.0)
        self.offered += 1
        one = group(self.offered, version=max(0, self.version - behind), rewards=rewards)
        is_recent = self.version - one.version <= self.settings.max_staleness
        assert self.buffer.add(one) == (is_recent and informative)
        if is_recent and informative:
            self.stored[one.digest] = one.version
            if len(self.stored) > 8:
                del self.stored[min(self.stored, key=lambda digest: self.stored[digest])]

    @rule(count=st.integers(0, 6))
    def draw(self, count: int) -> None:
        """Draw groups: they are different, and none is too stale or used too often."""
        had = len(self.buffer)
        groups = self.buffer.draw(count)
        assert len({g.digest for g in groups}) == len(groups) <= count
        for one in groups:
            self.uses[one.digest, one.version] += 1
            assert self.uses[one.digest, one.version] <= self.settings.max_uses
            assert self.version - one.version <= self.settings.max_staleness
            if self.uses[one.digest, one.version] == self.settings.max_uses:
                del self.stored[one.digest]
        assert len(groups) == min(count, had)

    @rule(ahead=st.integers(0, 3))
    def advance(self, ahead: int) -> None:
        self.version += ahead
        self.buffer.advance(self.version)
        for digest in [d for d, v in self.stored.items() if self.version - v > self.settings.max_staleness]:
            del self.stored[digest]

    @precondition(lambda self: self.offered)
    @rule()
    def restart(self) -> None:
        """Replace the buffer by one that is restored from its state."""
        new_buffer = ReplayBuffer(self.settings, seed=99)
        new_buffer.restore(self.buffer.freeze()())
        self.buffer = new_buffer

    @invariant()
    def it_has_what_it_should_have(self) -> None:
        """The groups are those that were stored and have not left; the bytes are within bounds."""
        assert len(self.buffer) == len(self.stored)
        assert 0 <= self.buffer.size <= self.settings.replay_bytes
        assert (self.buffer.size == 0) == (len(self.buffer) == 0)


TestBufferMachine = BufferMachine.TestCase
