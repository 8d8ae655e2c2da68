"""The replay buffer: bounds, order, and an account of every group."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from roles.trainer.learn.replay_buffer import Outcome, ReplayBuffer, ReplaySettings, TrainingGroup
from tests.learning.groups import group


def _buffer(**settings: float) -> ReplayBuffer:
    return ReplayBuffer(ReplaySettings(**settings), seed=0)  # type: ignore[arg-type]


def _same(left: TrainingGroup, right: TrainingGroup) -> bool:
    plain = ("digest", "miner", "window", "version", "prompt", "completions", "rewards")
    return all(getattr(left, name) == getattr(right, name) for name in plain) and all(
        torch.equal(a, b) for a, b in zip(left.logprobs, right.logprobs, strict=True)
    )


def test_a_group_is_used_max_uses_times() -> None:
    buffer = _buffer(max_uses=2)
    assert buffer.add(group("a")) is Outcome.STORED
    assert [len(buffer.draw(4)) for _ in range(3)] == [1, 1, 0]
    assert buffer.fates == {Outcome.STORED: 1, Outcome.USED_UP: 1}


def test_a_copy_is_refused_even_after_its_original_left() -> None:
    buffer = _buffer(max_uses=1)
    buffer.add(group("a"))
    assert buffer.add(group("a")) is Outcome.DUPLICATE
    buffer.draw(1)
    assert buffer.add(group("a")) is Outcome.DUPLICATE


def test_a_late_copy_of_an_old_group_is_too_stale() -> None:
    buffer = _buffer(max_staleness=2)
    buffer.add(group("a", version=0))
    buffer.draw(1)
    buffer.advance(3)
    assert buffer.add(group("a", version=0)) is Outcome.TOO_STALE


def test_staleness_is_counted_in_versions() -> None:
    buffer = _buffer(max_staleness=2)
    buffer.add(group("old", version=0))
    buffer.add(group("new", version=1))
    buffer.advance(2)
    assert len(buffer) == 2
    buffer.advance(3)
    assert [g.version for g in buffer.draw(4)] == [1]
    assert buffer.fates[Outcome.TOO_STALE] == 1


def test_equal_rewards_teach_nothing() -> None:
    buffer = _buffer()
    assert buffer.add(group("a", rewards=(1.0, 1.0))) is Outcome.UNINFORMATIVE
    assert len(buffer) == 0


def test_the_oldest_make_room() -> None:
    size = group("a").size
    buffer = _buffer(max_bytes=2 * size)
    for name, version in (("a", 2), ("b", 1), ("c", 3)):
        buffer.add(group(name, version=version))
    assert sorted(g.version for g in buffer.draw(4)) == [2, 3]
    assert buffer.fates[Outcome.CROWDED_OUT] == 1


def test_versions_do_not_go_back() -> None:
    buffer = _buffer()
    buffer.advance(3)
    with pytest.raises(ValueError, match="after 3"):
        buffer.advance(2)


def test_older_groups_are_drawn_less_often() -> None:
    """One of two, of staleness 0 and 2, at decay 1/2: the newer with probability 1 / (1 + 1/4)."""
    buffer = _buffer(decay=0.5, max_uses=10**9)
    buffer.add(group("old", version=0))
    buffer.add(group("new", version=2))
    buffer.advance(2)
    newer = sum(buffer.draw(1)[0].version == 2 for _ in range(4000)) / 4000
    assert newer == pytest.approx(0.8, abs=0.03)


@given(st.integers(0, 30), st.integers(0, 12))
def test_a_restored_buffer_goes_on_alike(count: int, drawn: int) -> None:
    settings = ReplaySettings(max_uses=2)
    one, other = ReplayBuffer(settings, seed=1), ReplayBuffer(settings, seed=2)
    for index in range(count):
        one.add(group(index, version=index % 5))
    one.advance(6)
    one.draw(drawn)
    other.restore(one.state())
    assert other.fates == one.fates
    assert other.size == one.size
    for _ in range(3):
        left, right = one.draw(5), other.draw(5)
        assert len(left) == len(right)
        assert all(_same(a, b) for a, b in zip(left, right, strict=True))
    assert other.add(group(0)) == one.add(group(0))


@pytest.mark.parametrize("state", [{}, {"records": torch.zeros(3, dtype=torch.uint8), "logprobs": torch.zeros(0)}])
def test_other_states_are_refused(state: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=r"replay|JSON|Expecting"):
        _buffer().restore(state)


def test_a_group_is_consistent() -> None:
    with pytest.raises(ValueError, match="reward"):
        group("a", rewards=(1.0,))


class Ledger(RuleBasedStateMachine):
    """However groups come and go, each is accounted for once and the bounds hold."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = ReplaySettings(max_bytes=8 * group("x").size, max_staleness=3, max_uses=2, decay=0.6)
        self.buffer = ReplayBuffer(self.settings, seed=0)
        self.version = 0
        self.offered = 0
        self.uses: dict[bytes, int] = {}

    @rule(name=st.integers(0, 40), behind=st.integers(0, 5), informative=st.booleans())
    def add(self, name: int, behind: int, informative: bool) -> None:
        """Offer a group."""
        rewards = (1.0, 0.0) if informative else (0.0, 0.0)
        self.buffer.add(group(name, version=max(0, self.version - behind), rewards=rewards))
        self.offered += 1

    @rule(count=st.integers(0, 6))
    def draw(self, count: int) -> None:
        """Draw: different groups, none too often, none too stale."""
        groups = self.buffer.draw(count)
        assert len({g.digest for g in groups}) == len(groups) <= count
        for drawn in groups:
            self.uses[drawn.digest] = self.uses.get(drawn.digest, 0) + 1
            assert self.version - drawn.version <= self.settings.max_staleness

    @rule(ahead=st.integers(0, 3))
    def advance(self, ahead: int) -> None:
        """Publish."""
        self.version += ahead
        self.buffer.advance(self.version)

    @precondition(lambda self: self.offered)
    @rule()
    def restart(self) -> None:
        """Die, and come back from the checkpoint."""
        restored = ReplayBuffer(self.settings, seed=99)
        restored.restore(self.buffer.state())
        self.buffer = restored

    @invariant()
    def accounts_balance(self) -> None:
        """Offered = stored + refused, and stored = held + left; bytes and uses within bounds."""
        fates = self.buffer.fates
        left = sum(fates.get(fate, 0) for fate in (Outcome.USED_UP, Outcome.CROWDED_OUT))
        stale = fates.get(Outcome.TOO_STALE, 0)  # refused at the door, or expired inside
        refused = fates.get(Outcome.DUPLICATE, 0) + fates.get(Outcome.UNINFORMATIVE, 0)
        assert self.offered == len(self.buffer) + left + stale + refused
        assert 0 <= self.buffer.size <= self.settings.max_bytes
        assert (self.buffer.size == 0) == (len(self.buffer) == 0)


TestLedger = Ledger.TestCase
