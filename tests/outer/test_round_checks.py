"""What a contribution must be, given the manifest that opened its round; and how groups are dealt."""

from collections import Counter
from typing import Any

import pytest

from protocol.identity.signing import Signed, open_signed, sign
from protocol.outer.round_checks import RefusedContributionError, check_contribution, owner
from protocol.outer.round_records import RoundContribution, RoundManifest
from tests.support.builders import samples
from tests.support.builders.samples import RUN_ID, TRAINER, WORKERS

OPENING: Signed[RoundManifest] = open_signed(sign(samples.round_manifest(), TRAINER), RoundManifest, [TRAINER.public])
GROUPS = [samples.digest(f"group {index}") for index in range(64)]
OWN = tuple(sorted(group for group in GROUPS if owner(RUN_ID, 1, group, WORKERS) == WORKERS[0]))
FOREIGN = tuple(sorted(set(GROUPS) - set(OWN)))


def contribution(**changes: Any) -> RoundContribution:
    return samples.contribution(**({"opening": OPENING.digest, "groups": OWN} | changes))


def test_a_sound_contribution_is_accepted() -> None:
    check_contribution(OPENING, contribution(), set())
    check_contribution(OPENING, contribution(groups=()), set(GROUPS))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run": samples.digest("other")}, "malformed"),
        ({"number": 2}, "malformed"),
        ({"opening": samples.digest("other")}, "other-state"),
        ({"beacon_round": OPENING.record.closes}, "late"),
        ({"state": samples.outer_state(weights=samples.digest("other"))}, "other-state"),
        ({"state": samples.outer_state(momentum=samples.digest("other"))}, "other-state"),
        ({"groups": FOREIGN[:1]}, "undealt"),
        ({"worker": WORKERS[1]}, "undealt"),
    ],
)
def test_a_contribution_is_refused_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RefusedContributionError) as error_info:
        check_contribution(OPENING, contribution(**changes), set())
    assert error_info.value.reason == reason


def test_a_group_that_is_used_up_is_refused() -> None:
    with pytest.raises(RefusedContributionError, match="used up") as error_info:
        check_contribution(OPENING, contribution(), {OWN[3]})
    assert error_info.value.reason == "undealt"


def test_each_worker_gets_its_share_and_keeps_it_when_another_joins() -> None:
    workers = [samples.digest(f"worker {index}") for index in range(4)]
    groups = [samples.digest(f"dealt {index}") for index in range(2000)]
    four = {group: owner(RUN_ID, 1, group, workers) for group in groups}
    five = {group: owner(RUN_ID, 1, group, [*workers, samples.digest("new")]) for group in groups}
    assert all(400 < count < 600 for count in Counter(four.values()).values())
    assert all(five[group] in (four[group], samples.digest("new")) for group in groups)
    assert {owner(RUN_ID, 2, group, workers) == four[group] for group in groups} == {True, False}


def test_the_error_feedback_is_frozen_in_the_first_steps() -> None:
    rules = samples.round_rules(frozen_steps=2)
    assert [rules.uses_feedback(step) for step in range(4)] == [False, False, True, True]
    assert not samples.round_rules(feedback_decay=0.0).uses_feedback(5)
