"""A trainer that collects verdicts on one miner's window, while an attacker controls other nodes or storage."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import trio

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.encoding import content_digest
from protocol.identity.signing import SigningKey, sign
from protocol.judging.ledger import SHARE, LedgerRow, Seal, Summary, Witness
from protocol.judging.verdict import Judgement, Verdict
from protocol.rollout.batch import Group, assemble, pack_tokens
from roles.ports import NotFoundError, ObjectStore
from roles.trainer.collect.collector import Collector
from roles.trainer.spool import COLLECTOR_PROGRESS, INBOX, OUTCOMES
from roles.trainer.verified_batch import CollectorProgress, VerifiedBatch, WindowOutcomes
from tests.support.builders import samples
from tests.support.builders.chains import MINER, TRAINER, make_node, small_run
from tests.support.builders.proofs import proof_of
from tests.support.faults.decorated_store import SlowStore
from tests.support.simulation.network import BEGIN, Log
from tests.support.simulation.trainer_events import Exclusions
from tests.support.simulation.virtual_clock import TrioClock

FIRST, SECOND = SigningKey(bytes([21]) * 32), SigningKey(bytes([22]) * 32)
STRANGER = SigningKey(bytes([23]) * 32)
WINDOW = 5  # in which a canary has false groups


class AttackedTrainer:
    """A trainer's collector, two validators of which `quorum` must accept, and one miner; `rules` are of the proof."""

    def __init__(
        self, quorum: int = 1, store: SlowStore | None = None, state: MemoryStore | None = None, **rules: Any
    ) -> None:
        _, run = small_run(samples.digest("genesis"))
        authority = run.authority.model_copy(
            update={"validators": tuple(sorted((FIRST.public, SECOND.public))), "quorum": quorum}
        )
        self.run = run.model_copy(update={"authority": authority, "proof": proof_of(samples.thresholds(), **rules)})
        self.run_id = content_digest(self.run.to_bytes())
        self.store, self.state, self.log = store or SlowStore(), state or MemoryStore(), Log("trainer")
        self.clock = TrioClock(BEGIN)
        self.node = make_node(self.run_id, self.run, self.store, self.state, self.log, TRAINER, clock=self.clock)
        self.groups = [self.group(index) for index in range(2)]

    def group(self, index: int, **changes: Any) -> Group:
        fields = {"run": self.run_id, "window": WINDOW, "version": 0, "miner": MINER.public}
        return samples.group(index, **(fields | changes))

    async def deliver(self, groups: Sequence[Group] | None = None, window: int = WINDOW) -> None:
        batch, commitment = assemble(groups or self.groups, "torch-float32")
        await self.store.put(paths.batch(MINER.public, commitment.window, commitment.batch), batch)
        await self.store.put(paths.commitment(MINER.public, window), sign(commitment, MINER))

    def judgement(self, index: int, **changes: Any) -> Judgement:
        """Return a judgement that accepts a group of the miner."""
        group = self.groups[min(index, 1)]
        fields: dict[str, Any] = {
            "digest": content_digest(group.to_frame()),
            "rewards": tuple(rollout.reward for rollout in group.rollouts),
            "logprobs": np.full(5, -0.5, "<f4").tobytes(),
        }
        return samples.judgement(index, **(fields | changes))

    def verdict(self, validator: SigningKey, *judgements: Judgement, **changes: Any) -> Verdict:
        """Return a verdict on the miner, which accepts both groups by default."""
        fields = {
            "run": self.run_id,
            "window": WINDOW,
            "version": 0,
            "miner": MINER.public,
            "validator": validator.public,
            "commitment": content_digest(assemble(self.groups, "torch-float32")[1].to_bytes()),
        }
        return samples.verdict(*(judgements or (self.judgement(0), self.judgement(1))), **(fields | changes))

    def summary(self, validator: SigningKey, *verdicts: Verdict, **changes: Any) -> Summary:
        """Return a summary that lists verdicts, and by which the miner earns something."""
        fields: dict[str, Any] = {"run": self.run_id, "window": WINDOW, "version": 0, "validator": validator.public}
        fields["scores"] = ((MINER.public, SHARE),)
        return samples.summary(*(LedgerRow.of(verdict) for verdict in verdicts), **(fields | changes))

    async def seal(self, validator: SigningKey, summary: Summary) -> None:
        digest, window = content_digest(summary.to_bytes()), summary.window
        seal = Seal(run=self.run_id, window=window, validator=validator.public, summary=digest)
        await self.store.put(paths.seal(validator.public, window), sign(seal, validator))

    async def attest(self, validator: SigningKey, window: int, *seals: bytes) -> None:
        """Put a witness of the seals that a validator has seen."""
        record = Witness(run=self.run_id, window=window, validator=validator.public, seals=seals)
        await self.store.put(paths.witness(validator.public, window), sign(record, validator))

    async def reveal(self, validator: SigningKey, summary: Summary, *verdicts: Verdict) -> None:
        """Put a summary, its verdicts, and a witness of no other seals."""
        await self.attest(validator, summary.window)
        for verdict in verdicts:
            await self.store.put(self.verdict_path(validator, summary.window), sign(verdict, validator))
        await self.store.put(paths.summary(validator.public, summary.window), sign(summary, validator))

    async def publish_records(self, validator: SigningKey, *judgements: Judgement, **changes: Any) -> None:
        """Put all records of a validator on a window, which accept both groups by default."""
        verdict = self.verdict(validator, *judgements, **changes)
        await self.seal_and_reveal(validator, self.summary(validator, verdict, window=verdict.window), verdict)

    async def seal_and_reveal(self, validator: SigningKey, summary: Summary, *verdicts: Verdict) -> None:
        """Put the seal of a summary, the summary, its verdicts, and a witness of no other seals."""
        await self.seal(validator, summary)
        await self.reveal(validator, summary, *verdicts)

    @staticmethod
    def verdict_path(validator: SigningKey, window: int = WINDOW) -> str:
        """Return the path of a validator's verdict on the miner."""
        return paths.verdict(validator.public, window, MINER.public)

    async def open_collector(self, canaries: int = 0) -> Collector:
        """Return a collector that starts when the window opens."""
        await self.clock.sleep_until(self.run.opening_time(WINDOW))
        return Collector(self.node, canaries=canaries)

    async def collect(self, until: float | None = None) -> None:
        """Let the trainer collect until a time, by default until the window has closed."""
        collector = await self.open_collector()
        end = closing_time(self) + 2.0 if until is None else until
        with trio.move_on_after(end - self.clock.now()):
            await collector.run()

    async def window_has_closed(self) -> bool:
        """Whether the collector has noted that no more verdicts on the window count."""
        try:
            data = await self.state.get(COLLECTOR_PROGRESS, CollectorProgress.max_bytes)
        except NotFoundError:
            return False
        return CollectorProgress.from_bytes(data).oldest_window > WINDOW

    async def group_outcomes(self) -> dict[bytes, str]:
        """Return the statuses of the miner's judged groups by digest; none before the collector decides."""
        statuses: dict[bytes, str] = {}
        for outcome_log in await read_outcomes(self.state):
            assert (outcome_log.window, outcome_log.miner) == (WINDOW, MINER.public)
            statuses.update({outcome.digest: outcome.status for outcome in outcome_log.outcomes})
        return statuses

    async def outcomes(self) -> set[str]:
        """Return the statuses of the miner's groups; assert that the inbox has each used group once and no other."""
        outcome_log = await self.group_outcomes()
        used_digests = [group.digest for batch in await self.inbox_batches() for group in batch.groups]
        assert sorted(used_digests) == sorted(digest for digest, outcome in outcome_log.items() if outcome == "used")
        assert set(used_digests) <= {content_digest(group.to_frame()) for group in self.groups}
        return set(outcome_log.values())

    def exclusions(self) -> list[tuple[str, str]]:
        """Return the validators that do not count for the window, each with the reason."""
        events = self.log.named("validator-excluded"), self.log.named("validator-sealed-again")
        return Exclusions(*events).of_window(WINDOW)

    async def inbox_batches(self) -> list[VerifiedBatch]:
        """Return what the learner is given."""
        return [
            VerifiedBatch.from_bytes(await self.state.get(item.path, 1 << 20)) async for item in self.state.list(INBOX)
        ]


async def read_outcomes(state: ObjectStore) -> list[WindowOutcomes]:
    """Return what is logged in a trainer's state of every miner's window."""
    return [WindowOutcomes.from_bytes(await state.get(item.path, 1 << 20)) async for item in state.list(OUTCOMES)]


def group_with_other_prompt(testbed: AttackedTrainer) -> Group:
    """Return a first group with another prompt than the miner's."""
    return testbed.group(0, prompt=pack_tokens((9, 9)))


async def make_honest_testbed(
    quorum: int = 1, *validators: SigningKey, store: SlowStore | None = None
) -> AttackedTrainer:
    """Return a testbed in which the miner has delivered and the validators, by default both, have accepted."""
    testbed = AttackedTrainer(quorum, store)
    await testbed.deliver()
    for validator in validators or (FIRST, SECOND):
        await testbed.publish_records(validator)
    return testbed


async def reveal_in_turn(
    *turns: tuple[Sequence[Group], Sequence[Judgement] | None], restart: bool = False
) -> AttackedTrainer:
    """Let a trainer read one validator and, perhaps after a restart, the other; one acceptance is a quorum.

    Args:
        turns: the miner's groups, which are in storage for everybody when the validator reveals, and its judgements on
            them; None if it accepts them all.
    """
    testbed, records = AttackedTrainer(), []
    opening = testbed.run.opening_time(WINDOW)
    for validator, (groups, judgements) in zip((FIRST, SECOND), turns, strict=True):
        testbed.groups = list(groups)
        verdict = testbed.verdict(validator, *map(testbed.judgement, range(len(groups))))
        if judgements is not None:
            verdict = verdict.model_copy(update={"judgements": tuple(judgements)})
        summary = testbed.summary(validator, verdict)
        await testbed.seal(validator, summary)
        records.append((groups, validator, summary, verdict))

    async def reveal() -> None:
        for number, (groups, validator, summary, verdict) in enumerate(records, start=1):
            await testbed.clock.sleep_until(opening + 2.0 * number)
            await testbed.deliver(groups)
            await testbed.reveal(validator, summary, verdict)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(reveal)
        if restart:
            await testbed.collect(opening + 3.0)
            assert await testbed.group_outcomes()
        await testbed.collect()
    return testbed


async def collected_windows(testbed: AttackedTrainer) -> set[int]:
    """Return the windows of which the collector has recorded the outcomes."""
    return {paths.window_of(item.path.removeprefix(OUTCOMES)) async for item in testbed.state.list(OUTCOMES)}


def closing_time(testbed: AttackedTrainer, window: int = WINDOW) -> float:
    """Return the time at which a window's verdicts are due, in seconds since the Unix epoch."""
    return testbed.run.beacon.round_time(testbed.run.schedule.verdict(window))
