"""The miner: follow the chain, and in every window generate, commit and upload before the deadline."""

from collections.abc import Sequence
from dataclasses import dataclass

import trio

from protocol import paths
from protocol.errors import ProtocolError
from protocol.rollout import Group, assemble
from protocol.signing import sign
from roles.follower import Follower
from roles.miner.produce import Producer, Turn
from roles.node import Node
from roles.ports import Engine, EngineError, StoreError
from roles.serving import keep_fresh, serve

ANNOUNCED_SECONDS = 600.0


@dataclass(frozen=True)
class MinerSettings:
    """What a miner's operator decides.

    Attributes:
        groups: groups to aim for in a window, at most the run's quota.
        chunk: groups generated at a time; after each the clock is looked at.
        share: of the time to the deadline that generating may take; the rest is for the upload.
        poll_seconds: how often to look for a newer version.
    """

    groups: int
    chunk: int
    share: float
    poll_seconds: float


class Miner:
    """One miner of a run."""

    def __init__(
        self, node: Node, follower: Follower, engine: Engine, producer: Producer, settings: MinerSettings
    ) -> None:
        self._node = node
        self._follower = follower
        self._engine = engine
        self._producer = producer
        self._settings = settings
        self._chunk_seconds = 0.0  # of the slowest of the last few chunks, by which the next is planned

    async def run(self) -> None:
        """Mine window after window, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._node.keep_announced, "miner", ANNOUNCED_SECONDS)
            nursery.start_soon(keep_fresh, self._node, self._follower, self._settings.poll_seconds)
            while True:
                await self._mine(max(0, self._node.window() + 1))

    async def _mine(self, window: int) -> None:
        node = self._node
        await node.clock.sleep_until(node.run.opening_time(window))
        randomness = await node.randomness(node.run.schedule.opening(window))
        try:
            version = self._follower.chain.version_for(window)
            await serve(node, self._engine, await self._follower.hold(version))
            turn = Turn(window, randomness, version, node.key.public)
            groups = await self._generate(turn)
        except (StoreError, ProtocolError, EngineError) as error:
            node.telemetry.event("window-skipped", window=window, error=str(error))
            return
        if groups:
            await self._deliver(window, groups)

    async def _generate(self, turn: Turn) -> list[Group]:
        """Groups 0, 1, 2, ... until the quota is full or another chunk would not be done in time."""
        run, clock = self._node.run, self._node.clock
        opening, deadline = run.opening_time(turn.window), run.deadline_time(turn.window)
        stop = opening + (deadline - opening) * self._settings.share
        quota = min(self._settings.groups, run.groups)
        groups: list[Group] = []
        while len(groups) < quota and (not groups or clock.now() + self._chunk_seconds < stop):
            chunk = range(len(groups), min(quota, len(groups) + self._settings.chunk))
            began = clock.now()
            groups += await self._producer.produce(turn, chunk)
            self._chunk_seconds = max(clock.now() - began, 0.8 * self._chunk_seconds)
        return groups

    async def _deliver(self, window: int, groups: Sequence[Group]) -> None:
        """Upload the batch, then the commitment that makes it count; give up at the deadline."""
        node = self._node
        batch, commitment = assemble(groups)
        with trio.move_on_after(max(0.0, node.run.deadline_time(window) - node.clock.now())) as scope:
            await node.publish(paths.batch(node.key.public, window, commitment.batch), batch)
            await node.publish(paths.commitment(node.key.public, window), sign(commitment, node.key))
        if scope.cancelled_caught:
            node.telemetry.event("deadline-missed", window=window, groups=len(groups), bytes=len(batch))
            return
        node.telemetry.event(
            "delivered", window=window, version=commitment.version, groups=len(groups), bytes=len(batch)
        )


def _tokens(group: Group) -> int:
    return sum(len(rollout.completion) // 4 for rollout in group.rollouts)
