"""A trainer that hears validators about one miner's window, while validators, the miner and storage do as they like."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import trio

from grailnode.store.memory import MemoryStore
from protocol import paths
from protocol.digest import content_digest
from protocol.identity.signing import SigningKey, sign
from protocol.judging.ledger import LedgerRow, Seal, Summary, Witness
from protocol.judging.verdict import Judgement, Verdict
from protocol.rollout.batch import Group, assemble, pack_tokens
from roles.ports import ObjectInfo, StoreError
from roles.trainer.collect.collector import Collector, CollectorSettings
from roles.trainer.spool import INBOX, OUTCOMES
from roles.trainer.verified_batch import VerifiedBatch, WindowOutcomes
from tests.support.builders import samples
from tests.support.builders.chains import MINER, TRAINER, make_node, small_run
from tests.support.simulation.network import BEGIN, Log
from tests.support.simulation.trio_clock import TrioClock

FIRST, SECOND = SigningKey(bytes([21]) * 32), SigningKey(bytes([22]) * 32)
STRANGER = SigningKey(bytes([23]) * 32)
WINDOW = 2


class Silent(MemoryStore):
    """A store that does not answer for what lies below some prefixes, and counts how often it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: tuple[str, ...] = ()
        self.asked = 0

    async def get(self, path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        self.asked += 1
        if path.startswith(self.silent):
            raise StoreError(f"{path}: connection refused")
        return await super().get(path, max_bytes, offset=offset, size=size)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in super().list(prefix, after=after):
            yield info


class Court:
    """One trainer's collector, two validators of whom `quorum` must accept, and one miner."""

    def __init__(self, quorum: int = 1) -> None:
        _, run = small_run(samples.digest("genesis"))
        authority = run.authority.model_copy(
            update={"validators": tuple(sorted((FIRST.public, SECOND.public))), "quorum": quorum}
        )
        self.run = run.model_copy(update={"authority": authority})
        self.run_id = content_digest(self.run.to_bytes())
        self.store, self.state, self.log = Silent(), MemoryStore(), Log("trainer")
        self.clock = TrioClock(BEGIN)
        self.node = make_node(self.run_id, self.run, self.store, self.state, self.log, TRAINER, clock=self.clock)
        self.groups = [self.group(index) for index in range(2)]

    def group(self, index: int, **changes: Any) -> Group:
        """A group of the miner's."""
        own = {"run": self.run_id, "window": WINDOW, "version": 0, "miner": MINER.public}
        return samples.group(index, **(own | changes))

    async def deliver(self, groups: Sequence[Group] | None = None, window: int = WINDOW) -> None:
        """What the miner commits to."""
        batch, commitment = assemble(groups or self.groups)
        await self.store.put(paths.batch(MINER.public, commitment.window, commitment.batch), batch)
        await self.store.put(paths.commitment(MINER.public, window), sign(commitment, MINER))

    def judgement(self, index: int, **changes: Any) -> Judgement:
        """The judgement that accepts a group of the miner's."""
        group = self.groups[min(index, 1)]
        own: dict[str, Any] = {
            "digest": content_digest(group.to_frame()),
            "rewards": tuple(rollout.reward for rollout in group.rollouts),
            "logprobs": np.full(5, -0.5, "<f4").tobytes(),
        }
        return samples.judgement(index, **(own | changes))

    def verdict(self, validator: SigningKey, *judgements: Judgement, **changes: Any) -> Verdict:
        """A verdict on the miner; both groups accepted unless judgements are given."""
        own = {
            "run": self.run_id,
            "window": WINDOW,
            "version": 0,
            "miner": MINER.public,
            "validator": validator.public,
            "commitment": content_digest(assemble(self.groups)[1].to_bytes()),
        }
        return samples.verdict(*(judgements or (self.judgement(0), self.judgement(1))), **(own | changes))

    def summary(self, validator: SigningKey, *verdicts: Verdict, **changes: Any) -> Summary:
        """A summary that lists verdicts."""
        own: dict[str, Any] = {"run": self.run_id, "window": WINDOW, "version": 0, "validator": validator.public}
        return samples.summary(*(LedgerRow.of(verdict) for verdict in verdicts), **(own | {"scores": ()} | changes))

    async def seal(self, validator: SigningKey, summary: Summary) -> None:
        """Promise a summary."""
        digest, window = content_digest(summary.to_bytes()), summary.window
        seal = Seal(run=self.run_id, window=window, validator=validator.public, summary=digest)
        await self.store.put(paths.seal(validator.public, window), sign(seal, validator))

    async def attest(self, validator: SigningKey, window: int, *seals: bytes) -> None:
        """Say which seals of others a validator saw."""
        record = Witness(run=self.run_id, window=window, validator=validator.public, seals=seals)
        await self.store.put(paths.witness(validator.public, window), sign(record, validator))

    async def reveal(self, validator: SigningKey, summary: Summary, *verdicts: Verdict) -> None:
        """Put a summary and its verdicts, and that no seals of others were seen."""
        await self.attest(validator, summary.window)
        for verdict in verdicts:
            await self.store.put(self.place(validator, summary.window), sign(verdict, validator))
        await self.store.put(paths.summary(validator.public, summary.window), sign(summary, validator))

    async def say(self, validator: SigningKey, *judgements: Judgement, **changes: Any) -> None:
        """Everything that a validator says of a window: accepts both groups unless told otherwise."""
        verdict = self.verdict(validator, *judgements, **changes)
        summary = self.summary(validator, verdict)
        await self.seal(validator, summary)
        await self.reveal(validator, summary, verdict)

    @staticmethod
    def place(validator: SigningKey, window: int = WINDOW) -> str:
        """Where a validator's verdict on the miner lies."""
        return paths.verdict(validator.public, window, MINER.public)

    async def open(self) -> Collector:
        """A trainer that has been there since the window opened."""
        await self.clock.sleep_until(self.run.opening_time(WINDOW))
        return Collector(self.node, CollectorSettings())

    async def listen(self, until: float | None = None) -> None:
        """Let the trainer collect, until some time after the window's end unless told."""
        collector = await self.open()
        closing = self.run.beacon.round_time(self.run.schedule.verdict(WINDOW)) + 2.0 if until is None else until
        with trio.move_on_after(closing - self.clock.now()):
            await collector.run()

    async def account(self) -> dict[bytes, str]:
        """What became of each judged group of the miner's window; empty while there is no account."""
        found: dict[bytes, str] = {}
        async for item in self.state.list(OUTCOMES):
            account = WindowOutcomes.from_bytes(await self.state.get(item.path, 1 << 20))
            assert (account.window, account.miner) == (WINDOW, MINER.public)
            found.update({outcome.digest: outcome.status for outcome in account.outcomes})
        return found

    async def outcomes(self) -> set[str]:
        """What became of the miner's groups; 'used' ones lie in the learner's inbox, each once, and nothing else
        does.
        """
        account = await self.account()
        trained = [group.digest for harvest in await self._harvests() for group in harvest.groups]
        assert sorted(trained) == sorted(digest for digest, outcome in account.items() if outcome == "used")
        assert set(trained) <= {content_digest(group.to_frame()) for group in self.groups}
        return set(account.values())

    async def _harvests(self) -> list[VerifiedBatch]:
        return [
            VerifiedBatch.from_bytes(await self.state.get(item.path, 1 << 20)) async for item in self.state.list(INBOX)
        ]


def other_prompt(court: Court) -> Group:
    """Another first group than the miner's."""
    return court.group(0, prompt=pack_tokens((9, 9)))
