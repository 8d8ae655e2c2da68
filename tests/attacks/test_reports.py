"""Storage that lies to an observer about reports and verdicts: it raises an alarm and still shows the rest
(grailnode/observe/observer.py).
"""

from typing import Any

import pytest

from grailnode.observe.observer import Observer
from protocol import paths
from protocol.identity.signing import SigningKey, sign
from protocol.judging.report import ValidatorReport
from tests.support.attacked_nodes.trainer import FIRST, SECOND, STRANGER, WINDOW, AttackedTrainer
from tests.support.builders import samples
from tests.support.builders.chains import TRAINER
from tests.support.simulation.virtual_clock import simulated

LATER = WINDOW + 1


async def put(
    testbed: AttackedTrainer, window: int, signer: SigningKey = TRAINER, at: int | None = None, **changes: Any
) -> None:
    """Put a report of the trainer into storage."""
    own: dict[str, Any] = {"run": testbed.run_id, "window": window, "trainer": TRAINER.public}
    record: ValidatorReport = samples.report(**(own | changes))
    await testbed.store.put(paths.report(TRAINER.public, window if at is None else at), sign(record, signer))


async def alarms(testbed: AttackedTrainer) -> list[str]:
    """Return an observer's alarms, which a second refresh must not repeat."""
    await testbed.clock.sleep_until(testbed.run.opening_time(LATER))
    observer = Observer(testbed.node, 0)
    await observer.refresh()
    first = observer.state().alarms
    await observer.refresh()
    assert observer.state().alarms == first
    return list(first)


@simulated
async def test_a_report_raises_alarms():
    testbed = AttackedTrainer()
    await put(testbed, WINDOW)
    lines = await alarms(testbed)
    assert any("accepted a false canary" in line for line in lines)
    assert any("1 of 2 validators accept group 3" in line for line in lines)


@pytest.mark.parametrize(
    ("lie", "match"),
    [
        ({"signer": STRANGER}, "not signed by keys that may sign it"),
        ({"run": bytes(32)}, "is of another run"),
        ({"trainer": STRANGER.public}, "belongs at"),
        ({"window": WINDOW + 7, "at": WINDOW}, "belongs at"),
    ],
    ids=["forged", "of another run", "of another trainer", "duplicated from another window"],
)
@simulated
async def test_a_false_report_accuses_nobody_and_hides_no_later_one(lie: dict[str, Any], match: str) -> None:
    testbed = AttackedTrainer()
    await put(testbed, **({"window": WINDOW} | lie))
    await put(testbed, LATER, disagreements=())
    lines = await alarms(testbed)
    assert [line for line in lines if match in line]
    assert [line for line in lines if "canary" in line] == [
        f"window {LATER}: validator {samples.VALIDATOR.public.hex()[:8]} accepted a false canary"
    ]


@simulated
async def test_oversized_report():
    testbed = AttackedTrainer()
    await testbed.store.put(paths.report(TRAINER.public, WINDOW), bytes(ValidatorReport.max_bytes * 2))
    await put(testbed, LATER)
    assert any(line.startswith(f"window {LATER}") for line in await alarms(testbed))


@simulated
async def test_a_forged_summary_of_one_validator_does_not_hide_the_other():
    testbed = AttackedTrainer()
    await testbed.deliver()
    await testbed.publish_records(FIRST)
    await testbed.publish_records(SECOND)
    await testbed.store.put(paths.summary(FIRST.public, WINDOW), sign(testbed.summary(FIRST), STRANGER))
    await testbed.clock.sleep_until(testbed.run.opening_time(LATER))
    observer = Observer(testbed.node, 0)
    await observer.refresh()
    state = observer.state()
    assert [row.accepted for row in state.windows if row.window == WINDOW] == [2]
    assert any("not signed by keys" in line for line in state.alarms)


@simulated
async def test_withheld_records_of_one_validator_do_not_hide_the_other():
    testbed = AttackedTrainer()
    await testbed.deliver()
    await testbed.publish_records(SECOND)
    testbed.store.silent_prefixes = (FIRST.public.hex(),)
    await testbed.clock.sleep_until(testbed.run.opening_time(LATER))
    observer = Observer(testbed.node, 0)
    await observer.refresh()
    assert [row.accepted for row in observer.state().windows if row.window == WINDOW] == [2]
