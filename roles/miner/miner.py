"""The miner: follow the chain, pledge, and in every window generate, commit and upload before the deadline.

A pledge is in storage before the window opens, and delivering less costs score; so a miner pledges what it has been
able to do, and practises before the first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import trio

from protocol import paths
from protocol.errors import ProtocolError
from protocol.identity.signing import sign
from protocol.rollout.batch import Group, assemble
from roles.miner.produce import MiningWindow, Producer
from roles.node.change_reporter import ChangeReporter
from roles.node.identity import Node
from roles.policy.follower import Follower, VerifiedWeights
from roles.policy.serving import keep_fresh, serve
from roles.ports import BeaconError, Engine, EngineError, StoreError

ANNOUNCED_SECONDS = 600.0
_RENEWED_WINDOWS = 2  # a validator that could not see a commitment holds the pledge void until it is given anew
_CAUTION = 0.8  # of the time that a window has, what is pledged takes at most so much


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
        self._pledged = 0  # groups, as the newest announcement says
        self._until = -math.inf  # when that is to be renewed, in seconds of the process's own time
        self._mined = -1  # the newest window that has opened for this miner
        self._group_seconds = 0.0  # in the slowest of the last few chunks, by which the next is planned

    async def run(self) -> None:
        """Mine window after window, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_fresh, self._node, self._follower, self._settings.poll_seconds)
            await self._begin()
            while True:
                await self._mine(await self._node.next_window(self._mined))

    async def _begin(self) -> None:
        """Be known, and pledge what practice says as soon as there is a policy to practise with."""
        reporter = ChangeReporter(self._node.telemetry, "practice-failed")
        await self._pledge(0)
        while True:
            try:
                if self._follower.newest is not None:
                    await self._practise(self._follower.newest)
                    return await self._promise(self._node.window())
            except (StoreError, ProtocolError, EngineError) as error:
                reporter.failure(error)
            await trio.sleep(self._settings.poll_seconds)
            await self._pledge(0)

    async def _pledge(self, groups: int) -> None:
        """Announce how many groups the windows to come will bring, where that changes or has to be said again."""
        if groups != self._pledged or trio.current_time() >= self._until:
            await self._node.announce("miner", ANNOUNCED_SECONDS, groups)
            schedule = self._node.run.schedule
            renewal = _RENEWED_WINDOWS * schedule.rounds * self._node.run.beacon.period_ms / 1000
            self._pledged, self._until = groups, trio.current_time() + min(ANNOUNCED_SECONDS / 3, renewal)

    async def _mine(self, window: int) -> None:
        """Keep the pledge of a window, then pledge what the next ones will bring.

        A pledge that is not kept at all counts no more, until it is given anew.
        """
        if not await self._keep(window, self._pledged):
            self._until = -math.inf
        await self._promise(window)

    async def _promise(self, window: int) -> None:
        """Pledge what the windows after this one will bring.

        Where that takes until the next has opened, it may count for that one, which is lost; and a pledge that was not
        kept is void until it is given anew.
        """
        await self._pledge(self._affordable())
        while (opened := self._node.window()) > window:
            error = f"window {window} and the pledge behind it took until it had opened"
            self._node.telemetry.event("window-skipped", window=opened, error=error)
            self._until, window = -math.inf, opened
            await self._pledge(self._pledged)

    def _affordable(self) -> int:
        """Groups that a window surely has time for, by the slowest of the last chunks; whole chunks where it has time
        for one.
        """
        run, settings = self._node.run, self._settings
        most = min(settings.groups, run.groups)
        seconds = (run.deadline_time(0) - run.opening_time(0)) * settings.share
        groups = int(_CAUTION * seconds / self._group_seconds) if self._group_seconds else most
        return max(1, min(most, groups - groups % settings.chunk if groups > settings.chunk else groups))

    async def _practise(self, held: VerifiedWeights) -> None:
        """Generate a chunk for nobody, twice: an engine is slow at first, and what it can do has to be known to be
        pledged.

        Raises:
            StoreError, ProtocolError, EngineError: it could not.
        """
        node = self._node
        turn = MiningWindow(max(0, node.window()), bytes(32), held.version, node.key.public)
        await serve(node, self._engine, held)
        for _ in range(2):
            began = trio.current_time()
            await self._producer.produce(turn, range(min(self._settings.chunk, node.run.groups)))
        seconds = trio.current_time() - began
        self._group_seconds = seconds / min(self._settings.chunk, node.run.groups)
        node.telemetry.event("practised", version=held.version, chunk_seconds=seconds)

    async def _keep(self, window: int, pledged: int) -> bool:
        """Generate and deliver what was pledged; whether anything was delivered in time."""
        node = self._node
        try:
            randomness = await node.randomness(node.run.schedule.opening(window))
            self._mined = window
            version = self._follower.version_for(window)
            await serve(node, self._engine, await self._follower.hold(version))
            groups = await self._generate(MiningWindow(window, randomness, version, node.key.public), pledged)
        except (StoreError, BeaconError, ProtocolError, EngineError) as error:
            node.telemetry.event("window-skipped", window=window, error=str(error))
            return False
        return await self._deliver(window, groups)

    async def _generate(self, turn: MiningWindow, pledged: int) -> list[Group]:
        """Groups 0, 1, 2, ... until the pledge is kept or another chunk would not be done in time."""
        run, clock = self._node.run, self._node.clock
        opening, deadline = run.opening_time(turn.window), run.deadline_time(turn.window)
        stop = opening + (deadline - opening) * self._settings.share
        groups: list[Group] = []

        def of_a_chunk() -> float:
            return self._group_seconds * self._settings.chunk

        while len(groups) < pledged and (not groups or clock.now() + of_a_chunk() < stop):
            chunk = range(len(groups), min(pledged, len(groups) + self._settings.chunk))
            began = trio.current_time()
            groups += await self._producer.produce(turn, chunk)
            whole = len(chunk) == self._settings.chunk
            if whole or not chunk.start:  # what is left of a pledge says less of what a chunk takes
                self._group_seconds = max((trio.current_time() - began) / len(chunk), 0.8 * self._group_seconds)
        return groups

    async def _deliver(self, window: int, groups: Sequence[Group]) -> bool:
        """Upload the batch, then the commitment that makes it count; False where the deadline came first."""
        node = self._node
        batch, commitment = assemble(groups)
        with trio.move_on_after(max(0.0, node.run.deadline_time(window) - node.clock.now())) as scope:
            await node.publish(paths.batch(node.key.public, window, commitment.batch), batch)
            await node.publish(paths.commitment(node.key.public, window), sign(commitment, node.key))
        if scope.cancelled_caught:
            node.telemetry.event("deadline-missed", window=window, groups=len(groups), bytes=len(batch))
            return False
        node.telemetry.event(
            "delivered", window=window, version=commitment.version, groups=len(groups), bytes=len(batch)
        )
        return True
