"""The miner: follow the chain, pledge, and in every window generate, upload and commit before the deadline.

A pledge is in storage before the window opens, and delivering less costs score. So a miner measures how fast it is
before its first pledge, and pledges no more than it has been able to do.
"""

import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import trio

from protocol import limits, paths
from protocol.environments.base import SandboxLimitError
from protocol.errors import ProtocolError
from protocol.identity.signing import sign
from protocol.rollout.batch import Group, assemble
from roles.miner.miner_settings import MinerSettings
from roles.miner.produce import MiningWindow, Producer
from roles.node.identity import Node
from roles.node.retries import ChangeReporter
from roles.policy.follower import Follower
from roles.policy.serving import keep_fresh, serve
from roles.policy.verified_weights import VerifiedWeights
from roles.ports import BeaconError, Engine, EngineError, StoreError

ANNOUNCEMENT_SECONDS = 600.0
_RENEWAL_WINDOWS = 2  # a validator that could not read a commitment ignores the pledge until it is announced anew
_CAUTION = 0.8  # the share of a window's time that the pledged groups may take
_REMEMBERED_CHUNKS = 4


class ChunkTimes:
    """The last chunks: how many groups each had, and the seconds that it took. By these a miner promises only what a
    window has time for.

    A larger chunk takes no less time than a smaller one, and each of its groups no more: on a GPU one group may take as
    long as eight. So a chunk that was measured bounds those of all other sizes, and a slow one does not make the miner
    promise ever less.
    """

    def __init__(self) -> None:
        self._chunks: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED_CHUNKS)

    def add(self, groups: int, seconds: float) -> None:
        """Take over how long a chunk of so many groups took."""
        # An older chunk that would contradict this one was computed while the machine was faster.
        slower = [(size, max(time, seconds * min(1.0, size / groups))) for size, time in self._chunks]
        self._chunks = deque([*slower, (groups, seconds)], maxlen=_REMEMBERED_CHUNKS)

    def of(self, groups: int) -> float:
        """Return how long a chunk of so many groups takes at most; 0 before the first measurement."""
        slowest: dict[int, float] = {}
        for size, time in self._chunks:
            slowest[size] = max(time, slowest.get(size, 0.0))
        return min((time * max(1.0, groups / size) for size, time in slowest.items()), default=0.0)

    def affordable(self, seconds: float, size: int, most: int) -> int:
        """Return how many groups, at least 1, there is time for: whole chunks if one fits, else a part of one."""
        if whole := self.of(size):
            chunks = int(seconds / whole)
            part = max((groups for groups in range(1, size) if self.of(groups) <= seconds), default=1)
            return min(most, chunks * size or part)
        return most


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
        self._pledged_groups, self._pledged_version = 0, 0  # in the newest announcement
        self._announcement = b""  # the newest one, as it was published
        self._renewal_time = -math.inf  # of that announcement, in trio's time
        self._last_window = -1  # the newest window that has opened for this miner
        self._times = ChunkTimes()

    async def run(self) -> None:
        """Mine window after window, for ever."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_fresh, self._node, self._follower, self._settings.poll_seconds)
            await self._begin()
            while True:
                await self._mine(await self._node.next_window(self._last_window))

    async def _begin(self) -> None:
        """Announce this miner, and make the first pledge as soon as there is a policy to measure its speed with."""
        reporter = ChangeReporter(self._node.telemetry, "warm-up-failed")
        await self._pledge(0)
        while True:
            try:
                if self._follower.newest is not None:
                    await self._warm_up(self._follower.newest)
                    return await self._pledge_next(self._node.window())
            except (StoreError, ProtocolError, EngineError) as error:
                reporter.failure(error)
            await trio.sleep(self._settings.poll_seconds)
            await self._pledge(0)

    async def _pledge(self, groups: int) -> None:
        """Announce how many groups each of the next windows will bring, and of which version, if that changes or has to
        be renewed."""
        pledge = groups, self._version_to_pledge(self._node.window() + 1)
        if pledge != (self._pledged_groups, self._pledged_version) or trio.current_time() >= self._renewal_time:
            node, run = self._node, self._node.run
            if self._announcement:  # another node with this key would have replaced it, which is then reported
                await node.is_readable(paths.participant(node.key.public), self._announcement)
                pledge = groups, self._version_to_pledge(node.window() + 1)  # by the time that it is then
            self._announcement = await node.announce("miner", ANNOUNCEMENT_SECONDS, *pledge, self._engine.arithmetic)
            renewal = _RENEWAL_WINDOWS * run.schedule.rounds * run.beacon.period_ms / 1000
            self._pledged_groups, self._pledged_version = pledge
            self._renewal_time = trio.current_time() + min(ANNOUNCEMENT_SECONDS / 3, renewal)

    def _version_to_pledge(self, window: int) -> int:
        """Return the newest version that serves a window; the one that is pledged if that may be used in it and some
        validators may have read the pledges already, because all of them must read the same version.
        """
        try:
            newest = self._follower.version_for(window)
        except ProtocolError:  # no version of the chain serves it as far as this node knows
            return self._pledged_version
        run = self._node.run
        is_late = run.beacon.round_at(self._node.clock.now()) >= run.schedule.pledges(window)
        is_usable = newest - run.schedule.max_lag <= self._pledged_version <= newest
        return self._pledged_version if self._pledged_groups and is_late and is_usable else newest

    async def _mine(self, window: int) -> None:
        """Deliver the pledged groups of a window, then pledge those of the next ones.

        Validators ignore a pledge of which nothing was delivered until it is announced anew. A miner that has delivered
        early waits for half of the time to the deadline, for newer versions, and pledges long before anybody reads it.
        """
        if not await self._fulfil_pledge(window, self._pledged_groups):
            self._renewal_time = -math.inf
        run = self._node.run
        half = (run.deadline_time(0) - run.opening_time(0)) / 2.0
        await trio.sleep(max(0.0, min(half, run.opening_time(window) + half - self._node.clock.now())))
        await self._pledge_next(window)

    async def _pledge_next(self, window: int) -> None:
        """Pledge groups for the windows after this one. Those that open meanwhile are lost: validators ignore a pledge
        of which nothing was delivered until it is announced anew.
        """
        run, settings = self._node.run, self._settings
        seconds = _CAUTION * settings.share * (run.deadline_time(0) - run.opening_time(0))
        most = min(settings.groups, run.groups, max(1, limits.MAX_BATCH_BYTES // run.group_bytes))
        await self._pledge(self._times.affordable(seconds, settings.chunk, most))
        while (current := self._node.window()) > window:
            error = f"window {window} and the pledge after it took until window {current} had opened"
            self._node.telemetry.event("window-skipped", window=current, error=error)
            self._renewal_time, window = -math.inf, current
            await self._pledge(self._pledged_groups)

    async def _warm_up(self, weights: VerifiedWeights) -> None:
        """Generate a chunk twice and throw it away: the first is slow, the second measures the speed."""
        node = self._node
        mining_window = self._mining_window(max(0, node.window()), bytes(32), weights.version)
        await serve(node, self._engine, weights)
        chunk = min(self._settings.chunk, node.run.groups)
        seconds = chunk * (node.run.deadline_time(0) - node.run.opening_time(0))  # for one group, if no chunk succeeds
        for _ in range(2):
            start = trio.current_time()
            with suppress(SandboxLimitError):
                await self._producer.produce(mining_window, range(chunk))
                seconds = trio.current_time() - start
        self._times.add(chunk, seconds)
        node.telemetry.event("warmed-up", version=weights.version, chunk_seconds=seconds)

    def _mining_window(self, window: int, randomness: bytes, version: int) -> MiningWindow:
        return MiningWindow(window, randomness, version, self._node.key.public, self._follower.shares(version))

    async def _fulfil_pledge(self, window: int, pledged_groups: int) -> bool:
        """Generate and deliver the pledged groups; return whether any were delivered in time."""
        node = self._node
        try:
            randomness = await node.randomness(node.run.schedule.opening(window))
            self._last_window = window
            self._follower.version_for(window)  # it raises if the head has expired
            version = self._pledged_version
            await serve(node, self._engine, await self._follower.rebuild(version))
            groups = await self._generate(self._mining_window(window, randomness, version), pledged_groups)
        except (StoreError, BeaconError, ProtocolError, EngineError, SandboxLimitError) as error:
            node.telemetry.event("window-skipped", window=window, error=str(error))
            return False
        return await self._deliver(window, groups)

    async def _generate(self, mining_window: MiningWindow, pledged_groups: int) -> list[Group]:
        """Generate groups 0, 1, 2, ... until all pledged ones are there or there is no time for another chunk."""
        run, clock = self._node.run, self._node.clock
        opening, deadline = run.opening_time(mining_window.window), run.deadline_time(mining_window.window)
        stop = opening + (deadline - opening) * self._settings.share
        groups: list[Group] = []
        size = self._settings.chunk
        while len(groups) < pledged_groups and (not groups or clock.now() + self._times.of(size) < stop):
            chunk = range(len(groups), min(pledged_groups, len(groups) + size))
            start = trio.current_time()
            try:
                groups += await self._producer.produce(mining_window, chunk)
            except SandboxLimitError as error:  # groups count from 0 without gaps, so none behind it can be delivered
                groups += await self._groups_before_limit(mining_window, chunk)
                if not groups:
                    raise
                self._node.telemetry.event("groups-left-out", window=mining_window.window, error=str(error))
                break
            self._times.add(len(chunk), trio.current_time() - start)
        return groups

    async def _groups_before_limit(self, mining_window: MiningWindow, chunk: range) -> list[Group]:
        """Return the groups of a chunk before the one whose environment reaches a limit."""
        groups: list[Group] = []
        with suppress(SandboxLimitError):
            for index in chunk:
                groups += await self._producer.produce(mining_window, range(index, index + 1))
        return groups

    async def _deliver(self, window: int, groups: Sequence[Group]) -> bool:
        """Upload the batch, then the commitment that makes it count; return False if the deadline came first."""
        node = self._node
        batch, commitment = assemble(groups, self._engine.arithmetic)
        with trio.move_on_after(max(0.0, node.run.deadline_time(window) - node.clock.now())) as scope:
            await node.publish(paths.batch(node.key.public, window, commitment.batch), batch)
            await node.publish(paths.commitment(node.key.public, window), sign(commitment, node.key))
        if scope.cancelled_caught:
            node.telemetry.event("deadline-missed", window=window, groups=len(groups), bytes=len(batch))
            return False
        version = commitment.version
        node.telemetry.event("delivered", window=window, version=version, groups=len(groups), bytes=len(batch))
        return True
