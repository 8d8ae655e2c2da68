"""Pauses between tries, and participants that are passed over for a while."""

from roles.node.participant_memory import Backoff
from roles.node.retries import Pause

KEY, OTHER = bytes(32), bytes([1]) * 32


def test_pauses_grow_from_the_first_to_the_longest() -> None:
    pause, lengths = Pause(first=0.5, longest=5.0), [0.0]
    for _ in range(5):
        lengths.append(pause.after(lengths[-1]))
    assert lengths[1:] == [0.5, 1.0, 2.0, 4.0, 5.0]
    assert Pause(first=0.2, longest=30.0, factor=1.5).after(1.0) == 1.5


def test_a_key_that_is_refused_again_is_passed_over_for_twice_as_long() -> None:
    backoff = Backoff()
    backoff.add_refusal(KEY, now=100.0)
    assert backoff.is_backing_off(KEY, 109.0)
    assert not backoff.is_backing_off(KEY, 110.0)
    assert not backoff.is_backing_off(OTHER, 109.0)
    backoff.add_refusal(KEY, now=110.0)
    assert backoff.is_backing_off(KEY, 129.0)
    assert not backoff.is_backing_off(KEY, 130.0)
    backoff.forget(KEY)
    assert not backoff.is_backing_off(KEY, 129.0)


def test_a_clock_that_is_set_back_ends_every_pause() -> None:
    backoff = Backoff()
    backoff.add_refusal(KEY, now=10_000.0)
    assert not backoff.is_backing_off(KEY, 1_000.0)
