"""Validators that lie, and storage that lies about them, to the trainer that reads their verdicts
(roles/trainer/collect).
"""

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import trio

from protocol import limits, paths
from protocol.encoding import content_digest
from protocol.identity.signing import sign
from protocol.judging.evidence import NO_COUNTS, Counts, Tally
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
from tests.support.simulation.virtual_clock import running

ALL_USED = {"used"}
Forgery = Callable[[AttackedTrainer], Awaitable[None]]


def logged_error(testbed: AttackedTrainer, event: str) -> str:
    """Return the error of the first event of a name in the trainer's log."""
    lines = [str(line["error"]) for line in testbed.log.named(event)]
    assert lines and all(len(line) < 500 and line.isprintable() for line in lines)
    return lines[0]


# Forged


async def foreign_verdict(testbed: AttackedTrainer) -> None:
    await testbed.publish_records(FIRST)
    await testbed.store.put(testbed.verdict_path(FIRST), sign(testbed.verdict(FIRST), STRANGER))


async def records_of_a_stranger(testbed: AttackedTrainer) -> None:
    await testbed.publish_records(STRANGER)


async def records_in_the_name_of_the_other(testbed: AttackedTrainer) -> None:
    verdict = testbed.verdict(FIRST)
    await testbed.seal_and_reveal(SECOND, testbed.summary(FIRST, verdict), verdict)


def verdict_with(**changes: Any) -> Forgery:
    """Return an attack in which a summary lists a verdict of the first validator with changes."""

    async def attack(testbed: AttackedTrainer) -> None:
        verdict, summary = testbed.verdict(FIRST, **changes), testbed.summary(FIRST, testbed.verdict(FIRST))
        row = summary.rows[0].model_copy(update={"verdict": content_digest(verdict.to_bytes())})
        await testbed.seal_and_reveal(FIRST, summary.model_copy(update={"rows": (row,)}), verdict)

    return attack


FORGERIES: dict[str, tuple[Forgery, set[str], str, str]] = {  # outcomes, event, its error
    "by a stranger": (foreign_verdict, {"no-quorum"}, "verdict-refused", "not signed by keys that may sign it"),
    "of a stranger": (records_of_a_stranger, set(), "", ""),
    "in the other's name": (records_in_the_name_of_the_other, set(), "summary-refused", "belongs at"),
    "another window": (verdict_with(window=WINDOW - 1), {"no-quorum"}, "verdict-refused", "belongs at"),
    "another run": (verdict_with(run=bytes(32)), {"no-quorum"}, "verdict-refused", "is of another run"),
    "another miner": (verdict_with(miner=STRANGER.public), {"no-quorum"}, "verdict-refused", "belongs at"),
}


@pytest.mark.parametrize(("attack", "outcomes", "event", "error"), FORGERIES.values(), ids=FORGERIES)
async def test_forged_records_do_not_count(attack: Forgery, outcomes: set[str], event: str, error: str) -> None:
    testbed = await make_honest_testbed(2, SECOND)
    await attack(testbed)
    await testbed.collect()
    assert await testbed.outcomes() == outcomes
    assert not event or error in logged_error(testbed, event)


async def test_forged_a_second_seal_after_the_other_validator_revealed():
    testbed = await make_honest_testbed(2, SECOND)
    await testbed.seal(FIRST, testbed.summary(FIRST))
    async with running((await testbed.open_collector()).run):
        await trio.sleep(1.0)
        await testbed.publish_records(FIRST)
        await testbed.clock.sleep_until(testbed.run.beacon.round_time(testbed.run.schedule.verdict(WINDOW)) + 2.0)
    assert await testbed.outcomes() == set()
    assert "not the summary that was sealed" in logged_error(testbed, "summary-refused")


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


INVENTED = {"index": 9, "digest": samples.digest("none")}
FALSE_JUDGEMENTS: dict[str, tuple[int, dict[str, Any], set[str]]] = {  # quorum, changes of the first, outcomes
    **{
        f"log-probability {value}": (
            quorum,
            {"logprobs": np.full(5, value, "<f4").tobytes()},
            {"used", LOGPROBS_DISAGREE},
        )
        for quorum, value in ((1, np.nan), (1, np.inf), (1, 0.5), (2, -50.0))
    },
    "a group that the miner did not commit to": (1, INVENTED, {"used", "verdict-does-not-fit"}),
    "other rewards": (1, {"rewards": (1_000_000, 1_000_000)}, {"used", "verdict-does-not-fit"}),
    "one reward": (1, {"rewards": (500_000,)}, {"used", "verdict-does-not-fit"}),
    "fewer tokens": (1, {"tokens": 4, "counts": NO_COUNTS, "logprobs": bytes(16)}, {"used", "verdict-does-not-fit"}),
}


@pytest.mark.parametrize(("quorum", "changes", "outcomes"), FALSE_JUDGEMENTS.values(), ids=FALSE_JUDGEMENTS)
async def test_forged_numbers_cost_the_group(quorum: int, changes: dict[str, Any], outcomes: set[str]) -> None:
    """Log-probabilities are outside their range or far from the other validator's; other numbers do not fit."""
    testbed = AttackedTrainer(quorum)
    await testbed.deliver()
    if quorum == 2:
        await testbed.publish_records(SECOND)
    judgements = testbed.judgement(**({"index": 0} | changes)), testbed.judgement(1)
    await testbed.publish_records(FIRST, *sorted(judgements, key=lambda judgement: judgement.index))
    await testbed.collect()
    assert await testbed.outcomes() == outcomes


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


async def test_the_largest_verdict_of_a_run_fits_its_limit():
    run = AttackedTrainer().run
    assert run.verdict_bytes < limits.MAX_VERDICT_BYTES
    tokens = run.group_size * run.sampling.max_tokens
    tally = Tally(trials=tokens, steps=(tokens // limits.MAX_STEPS,) * limits.MAX_STEPS)
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
    assert testbed.exclusions() == [(FIRST.public.hex()[:8], error)]


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


async def another_batch(testbed: AttackedTrainer) -> None:
    batch, commitment = assemble(testbed.groups, "torch-float32")
    await testbed.store.put(paths.batch(MINER.public, WINDOW, commitment.batch), bytes(reversed(batch)))


async def another_commitment(testbed: AttackedTrainer) -> None:
    await testbed.deliver([group_with_other_prompt(testbed), testbed.groups[1]])


async def oversized_commitment(testbed: AttackedTrainer) -> None:
    await testbed.store.put(paths.commitment(MINER.public, WINDOW), bytes(limits.MAX_COMMITMENT_BYTES * 2))


async def work_of_an_older_window(testbed: AttackedTrainer) -> None:
    testbed.groups = [testbed.group(index, window=WINDOW - 1) for index in range(2)]
    await testbed.deliver()
    await testbed.publish_records(SECOND)


@pytest.mark.parametrize("attack", [another_batch, another_commitment, oversized_commitment, work_of_an_older_window])
async def test_what_a_miner_changes_after_the_verdict_is_not_used(attack: Forgery) -> None:
    testbed = await make_honest_testbed(1, SECOND)
    await attack(testbed)
    await testbed.collect()
    changed = "changed-after-verdict" if attack is another_batch else "commitment-changed"
    assert await testbed.outcomes() == {changed}
