"""Storage that lies to an observer about reports and verdicts: it raises an alarm and still shows the rest
(grailnode/observe/observer.py).
"""

from typing import Any

import pytest

from grailnode.observe.observer import Observer
from protocol import paths
from protocol.identity.signing import SigningKey, sign
from protocol.judging.report import ValidatorReport
from tests.support.attacks.court import FIRST, SECOND, STRANGER, WINDOW, Court
from tests.support.attacks.target import attack
from tests.support.builders import samples
from tests.support.builders.chains import TRAINER

LATER = WINDOW + 1


async def put(court: Court, window: int, signer: SigningKey = TRAINER, at: int | None = None, **changes: Any) -> None:
    """Put a report of the trainer into storage."""
    own: dict[str, Any] = {"run": court.run_id, "window": window, "trainer": TRAINER.public}
    record: ValidatorReport = samples.report(**(own | changes))
    await court.store.put(paths.report(TRAINER.public, window if at is None else at), sign(record, signer))


async def alarms(court: Court) -> list[str]:
    """Return an observer's alarms, which a second refresh must not repeat."""
    await court.clock.sleep_until(court.run.opening_time(LATER))
    observer = Observer(court.node, 0)
    await observer.refresh()
    first = observer.state().alarms
    await observer.refresh()
    assert observer.state().alarms == first
    return list(first)


@attack
async def test_a_report_raises_alarms():
    court = Court()
    await put(court, WINDOW)
    lines = await alarms(court)
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
def test_a_false_report_accuses_nobody_and_hides_no_later_one(lie: dict[str, Any], match: str) -> None:
    async def scenario() -> None:
        court = Court()
        await put(court, **({"window": WINDOW} | lie))
        await put(court, LATER, disagreements=())
        lines = await alarms(court)
        assert [line for line in lines if match in line]
        assert [line for line in lines if "canary" in line] == [
            f"window {LATER}: validator {samples.VALIDATOR.public.hex()[:8]} accepted a false canary"
        ]

    attack(scenario)()


@attack
async def test_oversized_report():
    court = Court()
    await court.store.put(paths.report(TRAINER.public, WINDOW), bytes(ValidatorReport.max_bytes * 2))
    await put(court, LATER)
    assert any(line.startswith(f"window {LATER}") for line in await alarms(court))


@attack
async def test_a_forged_summary_of_one_validator_does_not_hide_the_other():
    court = Court()
    await court.deliver()
    await court.say(FIRST)
    await court.say(SECOND)
    await court.store.put(paths.summary(FIRST.public, WINDOW), sign(court.summary(FIRST), STRANGER))
    await court.clock.sleep_until(court.run.opening_time(LATER))
    observer = Observer(court.node, 0)
    await observer.refresh()
    state = observer.state()
    assert [row.accepted for row in state.windows if row.window == WINDOW] == [2]
    assert any("not signed by keys" in line for line in state.alarms)


@attack
async def test_withheld_records_of_one_validator_do_not_hide_the_other():
    court = Court()
    await court.deliver()
    await court.say(SECOND)
    court.store.silent = (FIRST.public.hex(),)
    await court.clock.sleep_until(court.run.opening_time(LATER))
    observer = Observer(court.node, 0)
    await observer.refresh()
    assert [row.accepted for row in observer.state().windows if row.window == WINDOW] == [2]
