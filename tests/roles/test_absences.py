"""Tests of roles/trainer/collect/absences.py."""

from roles.trainer.collect.absences import Absences
from tests.support.simulation.exclusions import NOT_SEALED, Exclusions
from tests.support.simulation.network import Log, key

FIRST, SECOND = key("validator-0").public, key("validator-1").public
NAME, OTHER_NAME = FIRST.hex()[:8], SECOND.hex()[:8]


def exclusions(log: Log) -> Exclusions:
    return Exclusions(log.named("validator-excluded"), log.named("validator-sealed-again"))


def test_only_the_first_window_of_an_absence_is_reported_and_then_the_return():
    log = Log("trainer")
    absences = Absences(log)
    for window in (4, 5, 6, 7):
        absences.add(FIRST, window)
    absences.end(SECOND, 7)
    absences.end(FIRST, 8)
    absences.end(FIRST, 9)
    assert [(line["window"], line["validator"]) for line in log.named("validator-excluded")] == [(4, NAME)]
    assert [(line["window"], line["windows_missed"]) for line in log.named("validator-sealed-again")] == [(8, 4)]


def test_the_next_absence_and_an_earlier_window_are_reported_again():
    log = Log("trainer")
    absences = Absences(log)
    absences.add(FIRST, 4)
    absences.add(FIRST, 3)  # windows are read side by side
    absences.end(FIRST, 5)
    absences.add(FIRST, 6)
    assert [line["window"] for line in log.named("validator-excluded")] == [4, 3, 6]


def test_a_window_before_one_that_was_sealed_begins_no_absence():
    log = Log("trainer")
    absences = Absences(log)
    absences.end(FIRST, 7)
    for window in (5, 6):
        absences.add(FIRST, window)
    assert [line["window"] for line in log.named("validator-excluded")] == [5, 6]
    assert exclusions(log).of_window(7) == []


def test_every_window_of_an_absence_can_be_told_from_the_events():
    log = Log("trainer")
    absences = Absences(log)
    for window in (4, 5):
        absences.add(FIRST, window)
    absences.end(FIRST, 6)
    for window in (7, 8):
        absences.add(FIRST, window)
    reasons = exclusions(log)
    assert [window for window in range(12) if reasons.reason(window, NAME)] == [4, 5, 7, 8, 9, 10, 11]
    assert reasons.reason(5, NAME) == NOT_SEALED
    assert reasons.reason(5, OTHER_NAME) == ""
