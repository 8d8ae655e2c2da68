"""Validators that lie, and storage that lies about them, to the trainer that reads their verdicts
(roles/trainer/collect).
"""

from typing import Any

import numpy as np
import pytest
import trio

from protocol import limits, paths
from protocol.encoding import content_digest
from protocol.identity.signing import sign
from protocol.judging.evidence import Counts, Tally
from protocol.rollout.batch import assemble
from roles.trainer.collect.quorum import LOGPROBS_DISAGREE
from tests.support.attacked_nodes.trainer import (
    FIRST,
    SECOND,
    STRANGER,
    WINDOW,
    AttackedTrainer,
    group_with_other_prompt,
    make_honest_testbed,
)
from tests.support.builders import samples
from tests.support.builders.chains import MINER
from tests.support.simulation.trainer_events import Exclusions
from tests.support.simulation.virtual_clock import running

ALL_USED = {"used"}


def logged_error(testbed: AttackedTrainer, event: str) -> str:
    """Return the error of the first event of a name in the trainer's log."""
    lines = [str(line["error"]) for line in testbed.log.named(event)]
    assert lines and all(len(line) < 500 and line.isprintable() for line in lines)
    return lines[0]


def exclusions_of(testbed: AttackedTrainer) -> list[tuple[str, str]]:
    """Return the validators that do not count for the window, each with the reason."""
    events = testbed.log.named("validator-excluded"), testbed.log.named("validator-sealed-again")
    return Exclusions(*events).of_window(WINDOW)


# Forged


async def test_forged_by_a_stranger_at_a_validators_path():
    testbed = await make_honest_testbed(2, SECOND)
    await testbed.publish_records(FIRST)
    await testbed.store.put(testbed.verdict_path(FIRST), sign(testbed.verdict(FIRST), STRANGER))
    await testbed.collect()
    assert await testbed.outcomes() == {"no-quorum"}
    assert "not signed by keys that may sign it" in logged_error(testbed, "verdict-refused")


async def test_forged_records_of_a_stranger_do_not_count():
    testbed = await make_honest_testbed(2, SECOND)
    await testbed.publish_records(STRANGER)
    await testbed.collect()
    assert await testbed.outcomes() == set()


async def test_forged_by_one_validator_in_the_name_of_the_other():
    testbed = await make_honest_testbed(2, SECOND)
    verdict = testbed.verdict(FIRST)
    summary = testbed.summary(FIRST, verdict)
    await testbed.seal_and_reveal(SECOND, summary, verdict)
    await testbed.collect()
    assert await testbed.outcomes() == set()
    assert "belongs at" in logged_error(testbed, "summary-refused")


@pytest.mark.parametrize("changes", [{"window": WINDOW - 1}, {"run": bytes(32)}, {"miner": STRANGER.public}], ids=str)
async def test_forged_a_verdict_for_another_window_run_or_miner(changes: dict[str, Any]) -> None:
    testbed = await make_honest_testbed(2, SECOND)
    verdict, honest_verdict = testbed.verdict(FIRST, **changes), testbed.verdict(FIRST)
    summary = testbed.summary(FIRST, honest_verdict)
    (row,) = summary.rows
    false_row = row.model_copy(update={"verdict": content_digest(verdict.to_bytes())})
    summary = summary.model_copy(update={"rows": (false_row,)})
    await testbed.seal_and_reveal(FIRST, summary, verdict)
    await testbed.collect()
    assert await testbed.outcomes() == {"no-quorum"}
    error = "is of another run" if "run" in changes else "belongs at"
    assert error in logged_error(testbed, "verdict-refused")


async def test_forged_a_second_seal_after_the_other_validator_revealed():
    testbed = await make_honest_testbed(2, SECOND)
    await testbed.seal(FIRST, testbed.summary(FIRST))
    async with running((await testbed.open_collector()).run):
        await trio.sleep(1.0)
        await testbed.publish_records(FIRST)
        await testbed.clock.sleep_until(testbed.run.beacon.round_time(testbed.run.schedule.verdict(WINDOW)) + 2.0)
    assert await testbed.outcomes() == set()
    assert "not the summary that was sealed" in logged_error(testbed, "summary-refused")


async def test_forged_a_group_that_the_miner_did_not_commit_to():
    testbed = AttackedTrainer()
    await testbed.deliver()
    invented = testbed.judgement(9, digest=samples.digest("none"))
    await testbed.publish_records(FIRST, testbed.judgement(0), testbed.judgement(1), invented)
    await testbed.collect()
    assert await testbed.outcomes() == {"used", "verdict-does-not-fit"}


async def test_forged_one_group_under_two_names():
    testbed = AttackedTrainer()
    await testbed.deliver()
    await testbed.publish_records(
        FIRST, testbed.judgement(0, digest=samples.digest("another name")), testbed.judgement(1)
    )
    await testbed.publish_records(SECOND)
    await testbed.collect()
    account = await testbed.group_outcomes()
    assert account[samples.digest("another name")] == "verdict-does-not-fit"
    assert await testbed.outcomes() == {"used", "verdict-does-not-fit"}


@pytest.mark.parametrize(("quorum", "value"), [(1, np.nan), (1, np.inf), (1, 0.5), (2, -50.0)])
async def test_forged_log_probabilities_cost_the_group(quorum: int, value: float) -> None:
    """They are outside their range, or far from those of the other validator."""
    testbed = AttackedTrainer(quorum)
    await testbed.deliver()
    if quorum == 2:
        await testbed.publish_records(SECOND)
    logprobs = np.full(5, value, "<f4").tobytes()
    await testbed.publish_records(FIRST, testbed.judgement(0, logprobs=logprobs), testbed.judgement(1))
    await testbed.collect()
    assert await testbed.outcomes() == {"used", LOGPROBS_DISAGREE}


@pytest.mark.parametrize(
    "changes",
    [{"rewards": (1_000_000, 1_000_000)}, {"rewards": (500_000,)}, {"tokens": 4, "logprobs": bytes(16)}],
    ids=str,
)
async def test_forged_numbers_that_do_not_fit_the_group(changes: dict[str, Any]) -> None:
    testbed = AttackedTrainer()
    await testbed.deliver()
    await testbed.publish_records(FIRST, testbed.judgement(0, **changes))
    await testbed.collect()
    assert await testbed.outcomes() == {"verdict-does-not-fit"}


# Oversized


@pytest.mark.parametrize("kind", ["seal", "summary", "verdict"])
async def test_oversized(kind: str) -> None:
    testbed = await make_honest_testbed()
    path = {
        "seal": paths.seal(FIRST.public, WINDOW),
        "summary": paths.summary(FIRST.public, WINDOW),
        "verdict": testbed.verdict_path(FIRST),
    }
    size = {"seal": 1 << 20, "summary": limits.MAX_SUMMARY_BYTES * 2, "verdict": testbed.run.verdict_bytes * 2}
    await testbed.store.put(path[kind], bytes(size[kind]))
    await testbed.collect()
    assert await testbed.outcomes() == ALL_USED


async def test_oversized_commitment_in_place_of_the_judged_one():
    testbed = await make_honest_testbed(1, SECOND)
    await testbed.store.put(paths.commitment(MINER.public, WINDOW), bytes(limits.MAX_COMMITMENT_BYTES * 2))
    await testbed.collect()
    assert await testbed.outcomes() == {"commitment-changed"}


async def test_the_largest_verdict_of_a_run_fits_its_limit():
    run = AttackedTrainer().run
    assert run.verdict_bytes < limits.MAX_VERDICT_BYTES
    tokens = run.group_size * run.sampling.max_tokens
    tally = Tally(trials=1000 * tokens, steps=(62 * tokens,) * limits.MAX_STEPS)
    largest = samples.judgement(
        4095,
        tokens=tokens,
        counts=Counts(sketch=tally, margin=tally, stop=tally),
        rewards=(-limits.MAX_REWARD,) * run.group_size,
        logprobs=bytes(4 * tokens),
    )
    verdict = samples.verdict(largest, pledged=4096, submitted=4096)
    assert len(verdict.to_bytes()) + (run.groups - 1) * len(largest.to_bytes()) < run.verdict_bytes


# Withheld


@pytest.mark.parametrize("kind", ["seals", "summaries", "verdicts"])
@pytest.mark.parametrize("quorum", [1, 2])
async def test_withheld(kind: str, quorum: int) -> None:
    testbed = await make_honest_testbed(quorum)
    async for item in testbed.store.list(paths.kind_prefix(FIRST.public, kind)):
        await testbed.store.delete(item.path)
    await testbed.collect()
    unused = {"no-quorum"} if kind == "verdicts" else set()  # one summary that lists a miner is not read further
    assert await testbed.outcomes() == ({"used"} if quorum == 1 else unused)
    error = "not sealed in time" if kind == "seals" else "sealed, and not revealed in time"
    assert exclusions_of(testbed) == [(FIRST.public.hex()[:8], error)]


async def test_withheld_until_the_other_seals_are_revealed():
    testbed = await make_honest_testbed(2, SECOND)
    async with running((await testbed.open_collector()).run):
        await testbed.clock.sleep_until(testbed.run.beacon.round_time(testbed.run.schedule.seal(WINDOW)) + 0.5)
        await testbed.publish_records(FIRST)
        await testbed.clock.sleep_until(testbed.run.beacon.round_time(testbed.run.schedule.verdict(WINDOW)) + 2.0)
    assert await testbed.outcomes() == set()
    assert exclusions_of(testbed) == [(FIRST.public.hex()[:8], "not sealed in time")]


async def test_withheld_batch_is_recorded_as_missing_in_the_end():
    testbed = await make_honest_testbed(1, SECOND)
    batch, commitment = assemble(testbed.groups, "torch-float32")
    await testbed.store.delete(paths.batch(MINER.public, WINDOW, commitment.batch))
    await testbed.collect(until=testbed.run.beacon.round_time(testbed.run.schedule.verdict(WINDOW)) - 0.5)
    assert await testbed.outcomes() == set()
    await testbed.collect()
    assert await testbed.outcomes() == {"missing-after-verdict"}
    assert batch


async def test_withheld_summaries_of_a_silent_space_delay_no_group_and_are_given_up():
    testbed = await make_honest_testbed()
    testbed.store.silent_prefixes = (paths.kind_prefix(FIRST.public, "summaries"),)
    last_round = testbed.run.schedule.verdict(WINDOW) + testbed.run.schedule.verdict_rounds
    async with running((await testbed.open_collector()).run):
        await trio.sleep(2.0)
        assert await testbed.outcomes() == ALL_USED
        assert "connection refused" in logged_error(testbed, "validator-unreachable")
        await testbed.clock.sleep_until(testbed.run.beacon.round_time(last_round) - 2.0)
        assert not await testbed.window_has_closed()
        await trio.sleep(4.0)
        assert await testbed.window_has_closed()


async def test_withheld_for_a_short_time_does_not_cost_the_quorum():
    testbed = await make_honest_testbed(2)
    testbed.store.silent_prefixes = (paths.kind_prefix(FIRST.public, "summaries"),)
    closing_time = testbed.run.beacon.round_time(testbed.run.schedule.verdict(WINDOW))
    async with running((await testbed.open_collector()).run):
        await testbed.clock.sleep_until(closing_time + 2.0)
        assert await testbed.outcomes() == set()  # the collector still waits for the summary
        testbed.store.silent_prefixes = ()
        await trio.sleep(2.0)
    assert await testbed.outcomes() == ALL_USED


# Changed or duplicated after the verdict


async def test_another_batch_after_the_verdict():
    testbed = await make_honest_testbed(1, SECOND)
    batch, commitment = assemble(testbed.groups, "torch-float32")
    await testbed.store.put(paths.batch(MINER.public, WINDOW, commitment.batch), bytes(reversed(batch)))
    await testbed.collect()
    assert await testbed.outcomes() == {"changed-after-verdict"}


async def test_another_commitment_after_the_verdict():
    testbed = await make_honest_testbed(1, SECOND)
    await testbed.deliver([group_with_other_prompt(testbed), testbed.groups[1]])
    await testbed.collect()
    assert await testbed.outcomes() == {"commitment-changed"}


async def test_duplicated_work_of_an_older_window_that_a_validator_accepts():
    testbed = AttackedTrainer()
    old_groups = [testbed.group(index, window=WINDOW - 1) for index in range(2)]
    await testbed.deliver(old_groups)
    testbed.groups = old_groups
    await testbed.publish_records(FIRST)
    await testbed.collect()
    assert await testbed.outcomes() == {"commitment-changed"}


async def test_duplicated_by_a_trainer_that_dies_before_it_records_the_outcome():
    testbed = await make_honest_testbed(1, SECOND)
    await testbed.collect(until=testbed.run.opening_time(WINDOW) + 2.0)
    assert await testbed.outcomes() == ALL_USED
    outcomes = [item.path async for item in testbed.state.list("outcomes/")]
    for path in outcomes:
        await testbed.state.delete(path)  # the trainer died before it had written the outcome
    await testbed.collect()
    assert await testbed.outcomes() == ALL_USED
