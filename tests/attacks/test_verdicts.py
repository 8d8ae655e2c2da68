"""Validators that lie, and storage that lies about them, to the trainer that reads their verdicts
(roles/trainer/collect).
"""

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

ALL_USED = {"used"}


async def honest_court(quorum: int = 1, *validators: Any) -> Court:
    """Return a court in which the miner and the given validators (else the second one) are honest."""
    court = Court(quorum)
    await court.deliver()
    for validator in validators or (SECOND,):
        await court.say(validator)
    return court


def logged_error(court: Court, event: str) -> str:
    """Return the error of the first event of a name in the trainer's log."""
    lines = [str(line["error"]) for line in court.log.named(event)]
    assert lines and all(len(line) < 500 and line.isprintable() for line in lines)
    return lines[0]


@attack
async def test_honest_verdicts_are_used():
    court = await honest_court(2, FIRST, SECOND)
    await court.listen()
    assert await court.outcomes() == ALL_USED


# Forged


@attack
async def test_forged_by_a_stranger_at_a_validators_path():
    court = await honest_court(2)
    await court.say(FIRST)
    await court.store.put(court.place(FIRST), sign(court.verdict(FIRST), STRANGER))
    await court.listen()
    assert await court.outcomes() == {"no-quorum"}
    assert "not signed by keys that may sign it" in logged_error(court, "verdict-refused")


@attack
async def test_forged_records_of_a_stranger_do_not_count():
    court = await honest_court(2)
    await court.say(STRANGER)
    await court.listen()
    assert await court.outcomes() == {"no-quorum"}


@attack
async def test_forged_by_one_validator_in_the_name_of_the_other():
    court = await honest_court(2)
    verdict = court.verdict(FIRST)
    summary = court.summary(FIRST, verdict)
    await court.seal(SECOND, summary)
    await court.reveal(SECOND, summary, verdict)
    await court.listen()
    assert await court.outcomes() == set()
    assert "belongs at" in logged_error(court, "summary-refused")


@pytest.mark.parametrize("changes", [{"window": WINDOW - 1}, {"run": bytes(32)}, {"miner": STRANGER.public}], ids=str)
def test_forged_a_verdict_for_another_window_run_or_miner(changes: dict[str, Any]) -> None:
    async def scenario() -> None:
        court = await honest_court(2)
        verdict, honest_verdict = court.verdict(FIRST, **changes), court.verdict(FIRST)
        summary = court.summary(FIRST, honest_verdict)
        (row,) = summary.rows
        false_row = row.model_copy(update={"verdict": content_digest(verdict.to_bytes())})
        summary = summary.model_copy(update={"rows": (false_row,)})
        await court.seal(FIRST, summary)
        await court.reveal(FIRST, summary, verdict)
        await court.listen()
        assert await court.outcomes() == {"no-quorum"}
        error = "is of another run" if "run" in changes else "belongs at"
        assert error in logged_error(court, "verdict-refused")

    attack(scenario)()


@attack
async def test_forged_a_summary_that_was_not_sealed():
    court = await honest_court(2)
    verdict = court.verdict(FIRST)
    await court.seal(FIRST, court.summary(FIRST))
    await court.reveal(FIRST, court.summary(FIRST, verdict), verdict)
    await court.listen()
    assert await court.outcomes() == {"no-quorum"}
    assert "not the summary that was sealed" in logged_error(court, "summary-refused")


@attack
async def test_forged_a_second_seal_after_the_other_validator_revealed():
    court = await honest_court(2)
    await court.seal(FIRST, court.summary(FIRST))
    collector = await court.open()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(collector.run)
        await trio.sleep(1.0)
        await court.say(FIRST)
        await court.clock.sleep_until(court.run.beacon.round_time(court.run.schedule.verdict(WINDOW)) + 2.0)
        nursery.cancel_scope.cancel()
    assert await court.outcomes() == {"no-quorum"}
    assert "not the summary that was sealed" in logged_error(court, "summary-refused")


@attack
async def test_forged_a_group_that_the_miner_did_not_commit_to():
    court = await honest_court(1, FIRST)
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
def test_forged_log_probabilities_outside_their_range(value: float) -> None:
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
async def test_forged_log_probabilities_of_one_validator_are_not_the_median():
    court = await honest_court(2, SECOND)
    low = np.full(5, -50.0, "<f4").tobytes()
    await court.say(FIRST, court.judgement(0, logprobs=low), court.judgement(1))
    await court.listen()
    assert await court.outcomes() == ALL_USED


# Oversized


@pytest.mark.parametrize("kind", ["seal", "summary", "verdict"])
def test_oversized(kind: str) -> None:
    async def scenario() -> None:
        court = await honest_court(1, FIRST, SECOND)
        path = {
            "seal": paths.seal(FIRST.public, WINDOW),
            "summary": paths.summary(FIRST.public, WINDOW),
            "verdict": court.place(FIRST),
        }
        size = {"seal": 1 << 20, "summary": limits.MAX_SUMMARY_BYTES * 2, "verdict": court.run.verdict_bytes * 2}
        await court.store.put(path[kind], bytes(size[kind]))
        await court.listen()
        assert await court.outcomes() == ALL_USED

    attack(scenario)()


@attack
async def test_oversized_commitment_in_place_of_the_judged_one():
    court = await honest_court()
    await court.store.put(paths.commitment(MINER.public, WINDOW), bytes(limits.MAX_COMMITMENT_BYTES * 2))
    await court.listen()
    assert await court.outcomes() == {"commitment-changed"}


def test_the_largest_verdict_of_a_run_fits_its_limit():
    court_run = trio.run(_run)
    assert court_run.verdict_bytes < limits.MAX_VERDICT_BYTES
    tokens = court_run.group_size * court_run.sampling.max_tokens
    largest = samples.judgement(
        4095,
        tokens=tokens,
        positions=tokens,
        sketch_misses=tokens,
        margin_misses=tokens,
        rewards=(-1e6 / 3,) * court_run.group_size,
        logprobs=bytes(4 * tokens),
    )
    verdict = samples.verdict(largest, pledged=4096, submitted=4096)
    assert len(verdict.to_bytes()) + (court_run.groups - 1) * len(largest.to_bytes()) < court_run.verdict_bytes


async def _run() -> Any:
    return Court().run


# Withheld


@pytest.mark.parametrize("kind", ["seals", "summaries", "verdicts"])
@pytest.mark.parametrize(("quorum", "outcome"), [(1, "used"), (2, "no-quorum")])
def test_withheld(kind: str, quorum: int, outcome: str) -> None:
    async def scenario() -> None:
        court = await honest_court(quorum, FIRST, SECOND)
        async for item in court.store.list(paths.kind_prefix(FIRST.public, kind)):
            await court.store.delete(item.path)
        await court.listen()
        assert await court.outcomes() == {outcome}
        error = "not sealed in time" if kind == "seals" else "sealed, and not revealed in time"
        ignored = [line for line in court.log.named("validator-excluded") if line["window"] == WINDOW]
        assert [(line["validator"], line["error"]) for line in ignored] == [(FIRST.public.hex()[:8], error)]

    attack(scenario)()


@attack
async def test_withheld_until_the_other_seals_are_revealed():
    court = await honest_court(2)
    collector = await court.open()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(collector.run)
        await court.clock.sleep_until(court.run.beacon.round_time(court.run.schedule.seal(WINDOW)) + 0.5)
        await court.say(FIRST)
        await court.clock.sleep_until(court.run.beacon.round_time(court.run.schedule.verdict(WINDOW)) + 2.0)
        nursery.cancel_scope.cancel()
    assert await court.outcomes() == {"no-quorum"}
    assert logged_error(court, "validator-excluded") == "not sealed in time"


@attack
async def test_withheld_batch_is_recorded_as_missing_in_the_end():
    court = await honest_court()
    batch, commitment = assemble(court.groups)
    await court.store.delete(paths.batch(MINER.public, WINDOW, commitment.batch))
    await court.listen(until=court.run.beacon.round_time(court.run.schedule.verdict(WINDOW)) - 0.5)
    assert await court.outcomes() == set()
    await court.listen()
    assert await court.outcomes() == {"missing-after-verdict"}
    assert batch


@attack
async def test_withheld_summaries_of_a_silent_space_delay_no_group_and_are_given_up():
    court = await honest_court(1, FIRST, SECOND)
    court.store.silent = (paths.kind_prefix(FIRST.public, "summaries"),)
    last_round = court.run.schedule.verdict(WINDOW) + court.run.schedule.verdict_rounds
    collector = await court.open()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(collector.run)
        await trio.sleep(2.0)
        assert await court.outcomes() == ALL_USED
        assert "connection refused" in logged_error(court, "validator-unreachable")
        await court.clock.sleep_until(court.run.beacon.round_time(last_round) - 2.0)
        assert WINDOW in collector.open_windows
        await trio.sleep(4.0)
        assert WINDOW not in collector.open_windows
        nursery.cancel_scope.cancel()


@attack
async def test_withheld_for_a_short_time_does_not_cost_the_quorum():
    court = await honest_court(2, FIRST, SECOND)
    court.store.silent = (paths.kind_prefix(FIRST.public, "summaries"),)
    closing = court.run.beacon.round_time(court.run.schedule.verdict(WINDOW))
    collector = await court.open()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(collector.run)
        await court.clock.sleep_until(closing + 2.0)
        assert await court.outcomes() == set()  # the collector still waits for the summary
        court.store.silent = ()
        await trio.sleep(2.0)
        nursery.cancel_scope.cancel()
    assert await court.outcomes() == ALL_USED


# Changed or duplicated after the verdict


@attack
async def test_another_batch_after_the_verdict():
    court = await honest_court()
    batch, commitment = assemble(court.groups)
    await court.store.put(paths.batch(MINER.public, WINDOW, commitment.batch), bytes(reversed(batch)))
    await court.listen()
    assert await court.outcomes() == {"changed-after-verdict"}


@attack
async def test_another_commitment_after_the_verdict():
    court = await honest_court()
    await court.deliver([other_prompt(court), court.groups[1]])
    await court.listen()
    assert await court.outcomes() == {"commitment-changed"}


@attack
async def test_duplicated_work_of_an_older_window_that_a_validator_accepts():
    court = Court()
    old_groups = [court.group(index, window=WINDOW - 1) for index in range(2)]
    await court.deliver(old_groups)
    court.groups = old_groups
    await court.say(FIRST)
    await court.listen()
    assert await court.outcomes() == {"commitment-changed"}


@attack
async def test_duplicated_by_a_trainer_that_dies_before_it_records_the_outcome():
    court = await honest_court()
    await court.listen(until=court.run.opening_time(WINDOW) + 2.0)
    assert await court.outcomes() == ALL_USED
    outcomes = [item.path async for item in court.state.list("outcomes/")]
    for path in outcomes:
        await court.state.delete(path)  # the trainer died before it had written the outcome
    await court.listen()
    assert await court.outcomes() == ALL_USED
