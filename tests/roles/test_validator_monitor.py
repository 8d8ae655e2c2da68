"""The validator monitor: who accepts false work of a canary, who rejects true work, and what the report contains."""

from typing import Any

import numpy as np
import pytest

from grailnode.store.memory import MemoryStore
from protocol.digest import digest_weights
from protocol.judging.report import ValidatorReport, canary_key, is_false_group
from protocol.judging.verdict import Judgement
from protocol.limits import MAX_GROUPS, MAX_KEYS
from roles.ports import StoreError
from roles.trainer.collect.validator_monitor import ValidatorMonitor
from roles.trainer.spool import canary_path, pack_canary_note
from tests.support.builders.chains import TRAINER, make_node, small_run, small_weights
from tests.support.builders.proofs import with_thresholds
from tests.support.builders.samples import judgement, rejected, verdict
from tests.support.faults.decorated_store import UnreachableStore
from tests.support.simulation.network import BEGIN, Log
from tests.support.simulation.virtual_clock import TrioClock, simulated

CANARY = canary_key(TRAINER, 0).public
WINDOW = next(w for w in range(100) if [is_false_group(TRAINER, w, i) for i in range(3)] == [False, True, False])
TRUE_WINDOW = next(w for w in range(100) if not any(is_false_group(TRAINER, w, i) for i in range(3)))


def make_monitor(state: MemoryStore | None = None, canaries: int = 1) -> tuple[ValidatorMonitor, Log]:
    """Return the monitor of a trainer in a run that tolerates log-probabilities that differ by 0.005, and its log."""
    run_id, run = small_run(digest_weights(small_weights(0)))
    run = run.model_copy(update={"proof": with_thresholds(run.proof, logprob_tolerance=0.005)})
    log = Log("trainer")
    node = make_node(run_id, run, MemoryStore(), state or MemoryStore(), log, TRAINER, clock=TrioClock(BEGIN))
    return ValidatorMonitor(node, canaries=canaries), log


@pytest.mark.parametrize(
    ("window", "judgements", "failures"),
    [
        (WINDOW, (judgement(0), rejected(1), judgement(2)), []),
        (WINDOW, (rejected(0, "improbable-window"), rejected(1), rejected(2, "improbable-window")), []),
        (WINDOW, (judgement(0), judgement(1)), [(1, True)]),
        (WINDOW, (rejected(0), rejected(1)), [(0, False)]),
        (WINDOW, (judgement(0), rejected(2, "improbable-window")), [(2, False)]),  # no false group was judged
        (TRUE_WINDOW, (judgement(0), judgement(1)), []),
        (TRUE_WINDOW, (rejected(0, "improbable-history"),), [(0, False)]),
    ],
)
@simulated
async def test_the_failures_of_a_validator_in_a_canarys_window(
    window: int, judgements: tuple[Judgement, ...], failures: list[tuple[int, bool]]
) -> None:
    monitor, log = make_monitor()
    canary_verdict = verdict(*judgements, window=window, miner=CANARY)
    validator = canary_verdict.validator
    await monitor.examine(window, CANARY, {validator: canary_verdict})
    assert [(event["index"], event["accepted"]) for event in log.named("canary-failure")] == failures
    accepted_false_work = any(accepted for _, accepted in failures)
    assert monitor.distrusted_validators == ({validator} if accepted_false_work else set())


@pytest.mark.parametrize(("change", "is_false"), [(0.0, False), (0.004, False), (-0.7, True), (10.0, True)])
@simulated
async def test_a_validator_with_false_log_probabilities_of_a_canary_is_distrusted(
    change: float, is_false: bool
) -> None:
    state = MemoryStore()
    monitor, _ = make_monitor(state)
    truth = np.linspace(-3.0, -0.1, 5, dtype=np.float32)
    opinion = judgement(0, logprobs=(truth + np.float32(change)).astype("<f4").tobytes())
    note = pack_canary_note("torch-float32", truth.astype("<f4").tobytes())
    await state.put(canary_path(WINDOW, 0, opinion.digest), note)
    # The validator says that the canary computes more roughly than it does; nothing is noted of group 2.
    canary_verdict = verdict(opinion, judgement(2), window=WINDOW, miner=CANARY, miner_arithmetic="torch-bfloat16")
    await monitor.examine(WINDOW, CANARY, {canary_verdict.validator: canary_verdict})
    assert monitor.distrusted_validators == ({canary_verdict.validator} if is_false else set())
    report = monitor.report(WINDOW)
    failures = report.canary_failures if report else ()
    assert [(item.index, item.about) for item in failures] == ([(0, "logprobs")] if is_false else [])
    await monitor.forget(WINDOW - 1)
    assert [item.path async for item in state.list("canaries/")] == [canary_path(WINDOW, 0, opinion.digest)]
    await monitor.forget(WINDOW)
    assert not [item.path async for item in state.list("canaries/")]


@simulated
async def test_a_validator_that_contradicts_all_verdicts_does_not_break_the_report() -> None:
    monitor, log = make_monitor()
    accepting = verdict(*map(judgement, range(16)), window=WINDOW)
    rejecting = accepting.model_copy(update={"judgements": tuple(map(rejected, range(16))), "validator": bytes(32)})
    for number in range(MAX_GROUPS // 16 + 1):
        verdicts = {accepting.validator: accepting, rejecting.validator: rejecting}
        monitor.compare(WINDOW, number.to_bytes(32, "big"), verdicts)
    await monitor.examine(WINDOW, CANARY, {accepting.validator: accepting})
    report = monitor.report(WINDOW)
    assert report is not None
    assert ValidatorReport.from_bytes(report.to_bytes()) == report
    assert len(report.disagreements) == MAX_GROUPS
    assert {failure.validator for failure in report.canary_failures} == {accepting.validator}
    assert len(log.named("report-truncated")) == 1


@simulated
async def test_a_report_on_very_many_validators_is_cut_to_what_a_record_holds() -> None:
    monitor, log = make_monitor(canaries=0)
    accepting, rejecting = verdict(*map(judgement, range(16))), verdict(*map(rejected, range(16)))
    verdicts = {number.to_bytes(32, "big"): accepting for number in range(MAX_KEYS)}
    verdicts[bytes([255]) * 32] = rejecting
    miners = ValidatorReport.max_bytes // (16 * MAX_KEYS * 32) + 1
    for number in range(miners):
        monitor.compare(WINDOW, number.to_bytes(32, "big"), verdicts)
    report = monitor.report(WINDOW)
    assert report is not None
    assert len(report.to_bytes()) < ValidatorReport.max_bytes
    assert ValidatorReport.from_bytes(report.to_bytes()) == report
    assert 0 < len(report.disagreements) < 16 * miners
    assert len(log.named("report-truncated")) == 1


@simulated
async def test_a_validator_that_failed_is_distrusted_although_the_disk_is_full() -> None:
    disk: Any = UnreachableStore(MemoryStore(), "", operations=("put",), seconds=0.0)
    monitor, _ = make_monitor(disk)
    false_verdict = verdict(judgement(1), window=WINDOW, miner=CANARY)
    with pytest.raises(StoreError):
        await monitor.examine(WINDOW, CANARY, {false_verdict.validator: false_verdict})
    assert monitor.distrusted_validators == {false_verdict.validator}
    disk.is_away = False
    await monitor.examine(WINDOW, CANARY, {false_verdict.validator: false_verdict})
    report = monitor.report(WINDOW)
    assert report is not None
    assert [item.accepted for item in report.canary_failures] == [True]
    restarted, _ = make_monitor(disk)
    await restarted.open()
    assert restarted.distrusted_validators == {false_verdict.validator}
