"""Groups that R1 deals to some of the validators: the roster of a window, and what the trainer makes of it."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.encoding import content_digest
from protocol.identity.signing import sign
from protocol.judging.evidence import NO_COUNTS, NO_EVIDENCE, Counts, advance
from protocol.judging.ledger import LedgerRow
from protocol.judging.roster import presence_windows
from protocol.judging.verdict import Judgement, Reason
from roles.rosters import Rosters
from roles.trainer.collect.quorum import Decision, LogprobRule, decide, refuse_improbable_window
from roles.trainer.collect.validator_monitor import Absences
from tests.support.builders import samples
from tests.support.builders.chains import TRAINER, make_node, small_run
from tests.support.builders.proofs import proof_of, with_thresholds
from tests.support.builders.samples import counts, judgement, rejected, thresholds, verdict
from tests.support.faults.decorated_store import SlowStore, UnreachableStore
from tests.support.simulation.network import BEGIN, Log, key
from tests.support.simulation.trainer_events import NOT_SEALED, Exclusions
from tests.support.simulation.virtual_clock import TrioClock

KEYS = sorted((samples.key(f"validator {number}") for number in range(4)), key=lambda key: key.public)
FOUR = tuple(key.public for key in KEYS)
WINDOW = 20


class FourValidators:
    """Four validators, of which `quorum` must accept, and their summaries."""

    def __init__(self, quorum: int = 1, spares: int = 0) -> None:
        _, run = small_run(samples.digest("genesis"))
        authority = run.authority.model_copy(update={"validators": FOUR, "quorum": quorum})
        self.run = run.model_copy(update={"authority": authority, "spares": spares})
        self.run_id = content_digest(self.run.to_bytes())
        self.store, self.log = SlowStore(), Log("reader")
        self.link = UnreachableStore(self.store, seconds=inf)
        clock = TrioClock(BEGIN)
        node = make_node(self.run_id, self.run, self.link, MemoryStore(), self.log, TRAINER, clock=clock)
        self.rosters = Rosters(node)
        self.windows = presence_windows(self.run.schedule, WINDOW)

    async def publish(self, validator: int, window: int, *rows: LedgerRow) -> None:
        key = KEYS[validator]
        fields: dict[str, Any] = {"run": self.run_id, "window": window, "validator": key.public, "scores": ()}
        data = sign(samples.summary(*rows, **fields), key)
        await self.store.put(paths.summary(key.public, window), data)

    async def members(self, shown: Mapping[int, Sequence[int]]) -> list[int]:
        """Return the numbers of the validators in the roster if these have judged in these windows."""
        for validator, windows in shown.items():
            for window in windows:
                await self.publish(validator, window, samples.row())
        roster = await self.rosters.get(WINDOW)
        return [FOUR.index(validator) for validator in roster.validators]


async def test_who_has_judged_in_one_of_the_windows_is_present():
    testbed = FourValidators()
    first, _, last = testbed.windows
    shown = {0: [first], 1: [last], 2: [first - 1, last + 1]}
    assert await testbed.members(shown) == [0, 1]
    (event,) = testbed.log.named("roster")
    assert event["absent"] == f"{FOUR[2].hex()[:8]},{FOUR[3].hex()[:8]}"


async def test_who_lists_and_never_judges_is_absent():
    testbed = FourValidators()
    idle = samples.row(dealt=4, audited=0, accepted=0, counts=NO_COUNTS)
    for window in testbed.windows:
        await testbed.publish(2, window, idle)
        await testbed.publish(3, window)
    assert await testbed.members({0: testbed.windows, 1: testbed.windows}) == [0, 1]


@pytest.mark.parametrize(
    ("quorum", "spares", "present", "members"), [(2, 0, [0], [0, 1, 2, 3]), (1, 0, [0], [0]), (2, 1, [0, 1], [0, 1])]
)
async def test_without_a_quorum_all_are_dealt_to(quorum: int, spares: int, present: list[int], members: list[int]):
    testbed = FourValidators(quorum, spares)
    assert await testbed.members(dict.fromkeys(present, testbed.windows)) == members


async def test_where_all_judge_all_nothing_is_read():
    testbed = FourValidators(quorum=2, spares=2)
    assert await testbed.members({}) == [0, 1, 2, 3]
    assert testbed.store.reads == 0


async def test_a_roster_is_read_once_and_storage_that_hangs_delays_it_for_a_part_of_the_window_only():
    testbed = FourValidators()
    testbed.link.prefixes = (FOUR[3].hex(),)
    start = trio.current_time()
    assert await testbed.members(dict.fromkeys(range(4), testbed.windows)) == [0, 1, 2]
    schedule = testbed.run.schedule
    assert trio.current_time() - start <= schedule.audit_rounds * testbed.run.beacon.period_ms / 1000 / 2
    testbed.link.prefixes = ()
    reads = testbed.store.reads
    assert await testbed.members({}) == [0, 1, 2]
    assert testbed.store.reads == reads


# What the trainer makes of groups that were dealt to some validators, and of validators that are absent


PROOF = proof_of(thresholds())
RULE = LogprobRule(with_thresholds(PROOF, logprob_tolerance=1_000_000))


def decision(
    judgements: dict[int, Judgement], judges: set[int], quorum: int, outstanding: Sequence[int] = ()
) -> Decision:
    """Return the decision on group 0.

    Args:
        judgements: by the validator's number.
    """
    verdicts = [verdict(item, validator=FOUR[number]) for number, item in judgements.items()]
    dealt = {FOUR[number] for number in judges}
    awaited = {FOUR[number] for number in outstanding}
    (result,) = decide(verdicts, quorum, awaited, RULE, FOUR, lambda group: dealt)
    return result


@given(st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3), min_size=1), st.integers(1, 3))
def test_a_group_is_accepted_if_a_quorum_of_its_judges_accepts_it(
    accepting: set[int], judges: set[int], quorum: int
) -> None:
    judgements = {number: judgement(0) if number in accepting else rejected(0) for number in range(4)}
    result = decision(judgements, judges, quorum)
    assert (not result.reason) == (len(accepting & judges) >= quorum)
    assert not result.pending


@pytest.mark.parametrize(("accepting", "judges", "others"), [(0, {0, 1}, [2, 3]), (3, {0}, [])])
def test_those_to_which_it_was_dealt_are_waited_for_and_no_others(
    accepting: int, judges: set[int], others: list[int]
) -> None:
    judgements, quorum = {accepting: judgement(0)}, len(judges)
    assert decision(judgements, judges, quorum, outstanding=[*judges - {accepting}]).pending
    result = decision(judgements, judges, quorum, outstanding=others)
    assert (result.reason, result.pending) == ("no-quorum", False)


def group_counts(misses: int) -> Counts:
    """Return the counts of a group of 1,000 tokens with so many misses of margins."""
    return counts(sketch=(1000,), margin=(1000, misses), stop=(8,))


def window(misses: Sequence[int], judges: int, liars: Sequence[int] = (), invented: int = 1000) -> list[Decision]:
    """Return the decisions on a window of groups of 1,000 tokens with so many misses of margins.

    Args:
        judges: of each group: those of four validators whose numbers follow the group's.
        liars: the numbers of the validators that invent misses in each of their groups.
    """

    def item(index: int, validator: int) -> Judgement:
        count = invented if validator in liars else misses[index]
        return judgement(index, tokens=1000, counts=group_counts(count), logprobs=bytes(4000))

    def dealt(index: int) -> set[int]:
        return {(index + step) % 4 for step in range(judges)}

    verdicts = [
        verdict(
            *(item(index, number) for index in range(len(misses)) if number in dealt(index)), validator=FOUR[number]
        )
        for number in range(4)
    ]
    return decide(verdicts, judges, set(), RULE, FOUR, lambda index: {FOUR[number] for number in dealt(index)})


def reasons(decisions: Sequence[Decision]) -> set[str]:
    return {item.reason for item in refuse_improbable_window(decisions, PROOF)}


@pytest.mark.parametrize("judges", [1, 2])
def test_a_window_that_no_validator_refuses_is_refused_for_the_evidence_of_all(judges: int) -> None:
    """Eight groups: the part of no validator has enough misses by itself."""
    misses, evidence = [6] * 8, NO_EVIDENCE
    for _ in range(2 * judges):
        evidence = advance(evidence, group_counts(6), thresholds())
    assert max(evidence) < thresholds().threshold
    assert reasons(window(misses, judges)) == {Reason.WINDOW.value}
    assert reasons(window([1] * 8, judges)) == {""}


@pytest.mark.parametrize("judges", [1, 2, 3])
@pytest.mark.parametrize("invented", [8, 1000])
def test_a_judge_that_invents_misses_refuses_nothing(judges: int, invented: int) -> None:
    assert reasons(window([1] * 8, judges, [2], invented)) == {""}


def test_a_judge_that_denies_misses_hides_its_own_groups_only() -> None:
    assert reasons(window([8] * 8, 1, [2], 0)) == {Reason.WINDOW.value}


def test_each_judgement_is_weighed_by_the_row_of_its_validator() -> None:
    """Where one validator's arithmetic explains the misses, the other one's does not refuse for them."""
    rough = samples.table((10_000, 50_000, 250_000), (1e-2, 1e-6, 1e-15), *[(0.5,) * 3, (0.0, 0.0, 12.0)] * 2)
    rows = [
        thresholds(miner=one, validator=other, **({"margin": rough} if "torch-bfloat16" in (one, other) else {}))
        for one in ("torch-bfloat16", "torch-float32")
        for other in ("torch-bfloat16", "torch-float32")
    ]
    proof = proof_of(*rows, miners=("torch-float32",))

    def decisions(second: str) -> list[Decision]:
        judgements = [judgement(index, tokens=1000, counts=group_counts(5), logprobs=bytes(4000)) for index in range(8)]
        verdicts = [
            verdict(*judgements, validator=FOUR[0]),
            verdict(*judgements, validator=FOUR[1], validator_arithmetic=second),
        ]
        return decide(verdicts, 2, set(), LogprobRule(proof), FOUR, lambda index: set(FOUR))

    for second, reason in (("torch-float32", "improbable-window"), ("torch-bfloat16", "")):
        assert {item.reason for item in refuse_improbable_window(decisions(second), proof)} == {reason}


# Validators that are absent


FIRST, SECOND = key("validator-0").public, key("validator-1").public
NAME, OTHER_NAME = FIRST.hex()[:8], SECOND.hex()[:8]


def exclusions(log: Log) -> Exclusions:
    return Exclusions(log.named("validator-excluded"), log.named("validator-sealed-again"))


def absences(*windows: int) -> Log:
    """Return the log of a trainer that reads windows, in which a validator is absent; negative: has sealed."""
    log = Log("trainer")
    own = Absences(log)
    for window in windows:
        if window < 0:
            own.end(FIRST, -window)
        else:
            own.add(FIRST, window)
    own.end(SECOND, 7)
    return log


@pytest.mark.parametrize(
    ("windows", "first_windows", "returns"),
    [
        ((4, 5, 6, 7, -8, -9), [4], [(8, 4)]),
        ((4, 3, -5, 6), [4, 3, 6], [(5, 2)]),  # windows are read side by side
        ((-7, 5, 6), [5, 6], []),
    ],
    ids=["an absence", "another absence and an earlier window", "windows before one that was sealed"],
)
def test_the_first_window_of_each_absence_is_reported_and_then_the_return(
    windows: Sequence[int], first_windows: list[int], returns: list[tuple[int, int]]
) -> None:
    log = absences(*windows)
    assert [(line["window"], line["validator"]) for line in log.named("validator-excluded")] == [
        (window, NAME) for window in first_windows
    ]
    assert [(line["window"], line["windows_missed"]) for line in log.named("validator-sealed-again")] == returns


def test_every_window_of_an_absence_can_be_told_from_the_events() -> None:
    reasons = exclusions(absences(4, 5, -6, 7, 8))
    assert [window for window in range(12) if reasons.reason(window, NAME)] == [4, 5, 7, 8, 9, 10, 11]
    assert reasons.reason(5, NAME) == NOT_SEALED
    assert reasons.reason(5, OTHER_NAME) == ""
    assert exclusions(absences(-7, 5, 6)).of_window(7) == []
