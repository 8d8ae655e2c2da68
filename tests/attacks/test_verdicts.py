"""Validators that lie, and storage that lies about them, before the trainer that reads them (verdict_reader.py)."""

from typing import Any

import numpy as np
import pytest
import trio

from protocol import limits, paths
from protocol.digest import content_digest
from protocol.identity.signing import sign
from protocol.rollout.batch import assemble
from tests.support.attacks.court import FIRST, SECOND, STRANGER, WINDOW, Court, other_prompt
from tests.support.attacks.target import attack
from tests.support.builders import samples
from tests.support.builders.chains import MINER

USED = {"used"}


async def honest(quorum: int = 1, *validators: Any) -> Court:
    """A court to which the miner and the given validators (else the second) have told the truth."""
    court = Court(quorum)
    await court.deliver()
    for validator in validators or (SECOND,):
        await court.say(validator)
    return court


def told(court: Court, event: str) -> str:
    """What the trainer logged about the first validator."""
    lines = [str(line["error"]) for line in court.log.named(event)]
    assert lines and all(len(line) < 500 and line.isprintable() for line in lines)
    return lines[0]


@attack
async def test_the_truth_is_trained_on():
    court = await honest(2, FIRST, SECOND)
    await court.listen()
    assert await court.outcomes() == USED


# Forged


@attack
async def test_forged_by_a_stranger_in_a_validators_place():
    court = await honest(2)
    await court.say(FIRST)
    await court.store.put(court.place(FIRST), sign(court.verdict(FIRST), STRANGER))
    await court.listen()
    assert await court.outcomes() == {"no-quorum"}
    assert "not signed by keys that may sign it" in told(court, "verdict-refused")


@attack
async def test_forged_a_strangers_whole_testimony_counts_for_nothing():
    court = await honest(2)
    await court.say(STRANGER)
    await court.listen()
    assert await court.outcomes() == {"no-quorum"}


@attack
async def test_forged_by_the_other_validator_in_this_ones_name():
    court = await honest(2)
    verdict = court.verdict(FIRST)
    summary = court.summary(FIRST, verdict)
    await court.seal(SECOND, summary)
    await court.reveal(SECOND, summary, verdict)
    await court.listen()
    assert await court.outcomes() == set()
    assert "belongs at" in told(court, "summary-refused")


@pytest.mark.parametrize("changes", [{"window": WINDOW - 1}, {"run": bytes(32)}, {"miner": STRANGER.public}], ids=str)
def test_forged_a_verdict_of_elsewhere(changes: dict[str, Any]) -> None:
    async def scenario() -> None:
        court = await honest(2)
        verdict, listed = court.verdict(FIRST, **changes), court.verdict(FIRST)
        summary = court.summary(FIRST, listed)
        (row,) = summary.rows
        lie = row.model_copy(update={"verdict": content_digest(verdict.to_bytes())})
        summary = summary.model_copy(update={"rows": (lie,)})
        await court.seal(FIRST, summary)
        await court.reveal(FIRST, summary, verdict)
        await court.listen()
        assert await court.outcomes() == {"no-quorum"}
        error = "is of another run" if "run" in changes else "belongs at"
        assert error in told(court, "verdict-refused")

    attack(scenario)()


@attack
async def test_forged_another_summary_than_was_sealed():
    court = await honest(2)
    verdict = court.verdict(FIRST)
    await court.seal(FIRST, court.summary(FIRST))
    await court.reveal(FIRST, court.summary(FIRST, verdict), verdict)
    await court.listen()
    assert await court.outcomes() == {"no-quorum"}
    assert "not the summary that was sealed" in told(court, "summary-refused")


@attack
async def test_forged_a_second_seal_after_the_others_have_spoken():
    court = await honest(2)
    await court.seal(FIRST, court.summary(FIRST))
    collector = await court.open()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(collector.run)
        await trio.sleep(1.0)
        await court.say(FIRST)
        await court.clock.sleep_until(court.run.beacon.round_time(court.run.schedule.verdict(WINDOW)) + 2.0)
        nursery.cancel_scope.cancel()
    assert await court.outcomes() == {"no-quorum"}
    assert "not the summary that was sealed" in told(court, "summary-refused")


@attack
async def test_forged_a_group_that_the_miner_never_promised():
    court = await honest(1, FIRST)
    await court.say(FIRST, court.judgement(0), court.judgement(1), court.judgement(9, digest=samples.digest("none")))
    await court.listen()
    assert await court.outcomes() == {"used", "verdict-does-not-fit"}


@attack
async def test_forged_one_group_under_two_names():
    court = Court()
    await court.deliver()
    await court.say(FIRST, court.judgement(0, digest=samples.digest("another name")), court.judgement(1))
    await court.say(SECOND)
    await court.listen()
    account = await court.account()
    assert account[samples.digest("another name")] == "verdict-does-not-fit"
    assert await court.outcomes() == {"used", "verdict-does-not-fit"}


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.5], ids=str)
def test_forged_log_probabilities_that_cannot_be(value: float) -> None:
    async def scenario() -> None:
        court = Court()
        await court.deliver()
        await court.say(FIRST, court.judgement(0, logprobs=np.full(5, value, "<f4").tobytes()), court.judgement(1))
        await court.listen()
        assert await court.outcomes() == {"used", "verdict-does-not-fit"}

    attack(scenario)()


@pytest.mark.parametrize(
    "changes",
    [{"rewards": (1.0, 1.0)}, {"rewards": (0.5,)}, {"tokens": 4, "positions": 4, "logprobs": bytes(16)}],
    ids=str,
)
def test_forged_numbers_that_do_not_fit_the_group(changes: dict[str, Any]) -> None:
    async def scenario() -> None:
        court = Court()
        await court.deliver()
        await court.say(FIRST, court.judgement(0, **changes))
        await court.listen()
        assert await court.outcomes() == {"verdict-does-not-fit"}

    attack(scenario)()


@attack
async def test_forged_log_probabilities_of_one_are_outvoted_by_two_in_the_median():
    court = await honest(2, SECOND)
    low = np.full(5, -50.0, "<f4").tobytes()
    await court.say(FIRST, court.judgement(0, logprobs=low), court.judgement(1))
    await court.listen()
    assert await court.outcomes() == USED


# Oversized


@pytest.mark.parametrize("kind", ["seal", "summary", "verdict"])
def test_oversized(kind: str) -> None:
    async def scenario() -> None:
        court = await honest(1, FIRST, SECOND)
        place = {
            "seal": paths.seal(FIRST.public, WINDOW),
            "summary": paths.summary(FIRST.public, WINDOW),
            "verdict": court.place(FIRST),
        }
        size = {"seal": 1 << 20, "summary": limits.MAX_SUMMARY_BYTES * 2, "verdict": court.run.verdict_bytes * 2}
        await court.store.put(place[kind], bytes(size[kind]))
        await court.listen()
        assert await court.outcomes() == USED

    attack(scenario)()


@attack
async def test_oversized_commitment_in_place_of_the_judged_one():
    court = await honest()
    await court.store.put(paths.commitment(MINER.public, WINDOW), bytes(limits.MAX_COMMITMENT_BYTES * 2))
    await court.listen()
    assert await court.outcomes() == {"commitment-changed"}


def test_a_verdict_has_no_more_room_than_this_run_can_fill():
    court_run = trio.run(_run)
    assert court_run.verdict_bytes < limits.MAX_VERDICT_BYTES
    tokens = court_run.group_size * court_run.sampling.max_tokens
    full = samples.judgement(
        4095,
        tokens=tokens,
        positions=tokens,
        sketch_misses=tokens,
        margin_misses=tokens,
        rewards=(-1e6 / 3,) * court_run.group_size,
        logprobs=bytes(4 * tokens),
    )
    verdict = samples.verdict(full, pledged=4096, submitted=4096)
    assert len(verdict.to_bytes()) + (court_run.groups - 1) * len(full.to_bytes()) < court_run.verdict_bytes


async def _run() -> Any:
    return Court().run


# Withheld


@pytest.mark.parametrize("kind", ["seals", "summaries", "verdicts"])
@pytest.mark.parametrize(("quorum", "outcome"), [(1, "used"), (2, "no-quorum")])
def test_withheld(kind: str, quorum: int, outcome: str) -> None:
    async def scenario() -> None:
        court = await honest(quorum, FIRST, SECOND)
        async for item in court.store.list(paths.kind_prefix(FIRST.public, kind)):
            await court.store.delete(item.path)
        await court.listen()
        assert await court.outcomes() == {outcome}
        sealed = "not sealed in time" if kind == "seals" else "sealed, and not revealed in time"
        unheard = [line for line in court.log.named("validator-excluded") if line["window"] == WINDOW]
        assert [(line["validator"], line["error"]) for line in unheard] == [(FIRST.public.hex()[:8], sealed)]

    attack(scenario)()


@attack
async def test_withheld_until_the_seals_are_open():
    court = await honest(2)
    collector = await court.open()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(collector.run)
        await court.clock.sleep_until(court.run.beacon.round_time(court.run.schedule.seal(WINDOW)) + 0.5)
        await court.say(FIRST)
        await court.clock.sleep_until(court.run.beacon.round_time(court.run.schedule.verdict(WINDOW)) + 2.0)
        nursery.cancel_scope.cancel()
    assert await court.outcomes() == {"no-quorum"}
    assert told(court, "validator-excluded") == "not sealed in time"


@attack
async def test_withheld_batch_is_waited_for_and_then_accounted_for():
    court = await honest()
    batch, commitment = assemble(court.groups)
    await court.store.delete(paths.batch(MINER.public, WINDOW, commitment.batch))
    await court.listen(until=court.run.beacon.round_time(court.run.schedule.verdict(WINDOW)) - 0.5)
    assert await court.outcomes() == set()
    await court.listen()
    assert await court.outcomes() == {"missing-after-verdict"}
    assert batch


@attack
async def test_withheld_by_a_validators_whole_storage_holds_nobody_up_and_not_for_ever():
    court = await honest(1, FIRST, SECOND)
    court.store.silent = (paths.kind_prefix(FIRST.public, "summaries"),)
    given_up = court.run.schedule.verdict(WINDOW) + court.run.schedule.verdict_rounds
    collector = await court.open()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(collector.run)
        await trio.sleep(2.0)
        assert await court.outcomes() == USED
        assert "connection refused" in told(court, "validator-unreachable")
        await court.clock.sleep_until(court.run.beacon.round_time(given_up) - 2.0)
        assert WINDOW in collector.open_windows
        await trio.sleep(4.0)
        assert WINDOW not in collector.open_windows
        nursery.cancel_scope.cancel()


@attack
async def test_withheld_for_a_while_by_storage_is_not_held_against_a_quorum():
    court = await honest(2, FIRST, SECOND)
    court.store.silent = (paths.kind_prefix(FIRST.public, "summaries"),)
    closing = court.run.beacon.round_time(court.run.schedule.verdict(WINDOW))
    collector = await court.open()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(collector.run)
        await court.clock.sleep_until(closing + 2.0)
        assert await court.outcomes() == set()  # what the last look would have shown is still wanted
        court.store.silent = ()
        await trio.sleep(2.0)
        nursery.cancel_scope.cancel()
    assert await court.outcomes() == USED


# Changed or duplicated after the verdict


@attack
async def test_another_batch_after_the_verdict():
    court = await honest()
    batch, commitment = assemble(court.groups)
    await court.store.put(paths.batch(MINER.public, WINDOW, commitment.batch), bytes(reversed(batch)))
    await court.listen()
    assert await court.outcomes() == {"changed-after-verdict"}


@attack
async def test_another_commitment_after_the_verdict():
    court = await honest()
    await court.deliver([other_prompt(court), court.groups[1]])
    await court.listen()
    assert await court.outcomes() == {"commitment-changed"}


@attack
async def test_duplicated_an_older_windows_work_with_a_validators_help():
    court = Court()
    old = [court.group(index, window=WINDOW - 1) for index in range(2)]
    await court.deliver(old)
    court.groups = old
    await court.say(FIRST)
    await court.listen()
    assert await court.outcomes() == {"commitment-changed"}


@attack
async def test_duplicated_by_a_trainer_that_dies_after_the_harvest():
    court = await honest()
    await court.listen(until=court.run.opening_time(WINDOW) + 2.0)
    assert await court.outcomes() == USED
    account = [item.path async for item in court.state.list("outcomes/")]
    for path in account:
        await court.state.delete(path)  # it died before the account was written
    await court.listen()
    assert await court.outcomes() == USED
