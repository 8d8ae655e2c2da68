"""The local steps of a site: those of the present round, and with a delay those for the next one while it closes.

The results of the steps become the payload of a contribution here. Nothing of it is durable: a site that is killed
takes the steps of the present round again, from the shared weights.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio
from torch import Tensor

from protocol.digest import Weights
from protocol.outer.local_work import State, begin_round, masters, with_masters
from protocol.outer.round_checks import most_groups, owner, turn_of
from protocol.outer.round_records import RoundManifest
from protocol.outer.shared_state import SharedState
from roles.node.identity import Node
from roles.trainer.spool import Inbox, is_too_stale
from roles.trainer.verified_batch import VerifiedGroup


class StepFigures(Protocol):
    """The figures of a local step that a site reports: the gradient's L2 norm is that before clipping."""

    @property
    def loss(self) -> float: ...

    @property
    def grad_norm(self) -> float: ...

    @property
    def reward(self) -> float: ...


class LocalLearner(Protocol):
    """What takes the local steps of a site: a state (protocol/outer/local_work.py) and a step, as `Learner` has."""

    def step(self, groups: Sequence[VerifiedGroup]) -> StepFigures:
        """Take one optimizer step; ValueError if a gradient is not finite, and nothing has changed."""

    def state(self) -> dict[str, Tensor]:
        """Return masters and everything else by name: CPU tensors that nobody else changes."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state."""


@dataclass(frozen=True)
class SiteSettings:
    """What a site's operator sets."""

    groups_per_step: int  # of one local step
    max_staleness: int = 8  # versions behind the newest; older groups are not used
    dynamic_filtering: bool = True  # whether groups whose rewards do not differ are not used
    upload_seconds: float = 5.0  # how long before the round closes the site stops its local steps
    file_bytes: int = 1 << 25  # of a payload's file, or one frame that is larger
    threads: int = 1  # that apply the contributions of a round
    poll_seconds: float = 0.5  # between two looks for groups and for the next round manifest


class GroupPool:
    """The verified groups, by digest, that a site has and no manifest has used up; some are dealt to it in a round. It
    is in memory only. What is in it lies in the inbox until it is used up or too stale, so a site that starts again
    reads it again.
    """

    def __init__(self, inbox: Inbox, run_id: bytes, max_staleness: int, *, dynamic_filtering: bool = True) -> None:
        self._inbox = inbox
        self._dynamic_filtering = dynamic_filtering
        self._run_id = run_id
        self._max_staleness = max_staleness
        self._groups: dict[bytes, VerifiedGroup] = {}
        self._used = frozenset[bytes]()

    def __len__(self) -> int:
        return len(self._groups)

    async def read_inbox(self, version: int) -> None:
        """Add what has come, drop what is too stale for a version, and delete the batches of which no group remains."""
        for group in await self._inbox.read():
            if (group.informative or not self._dynamic_filtering) and group.digest not in self._used:
                self._groups.setdefault(group.digest, group)
        groups = self._groups.items()
        self._groups = {d: g for d, g in groups if not is_too_stale(g.version, version, self._max_staleness)}
        await self._inbox.keep(lambda digest, _: digest in self._groups)

    def use_up(self, digests: Iterable[bytes]) -> None:
        """Set which groups manifests have named, without those that are too stale by now. They leave, and later copies
        of them are not added.
        """
        self._used = frozenset(digests)
        self._groups = {digest: group for digest, group in self._groups.items() if digest not in self._used}

    def dealt(
        self, turns: Collection[int], workers: Sequence[bytes], worker: bytes, without: Collection[bytes] = ()
    ) -> list[bytes]:
        """Return the digests of the groups that belong to a worker in each of some turns (`round_checks.turn_of`), the
        newest versions first, but for those to leave out.
        """
        own = [
            (-group.version, digest)
            for digest, group in self._groups.items()
            if digest not in without and all(owner(self._run_id, turn, digest, workers) == worker for turn in turns)
        ]
        return [digest for _, digest in sorted(own)]

    def groups(self, digests: Iterable[bytes]) -> list[VerifiedGroup]:
        """Return groups by their digests."""
        return [self._groups[digest] for digest in digests]


class LocalSteps:
    """Takes the local steps of one round after the other, each of its own groups from the pool of the verified ones.

    `number` is the round for which the present steps are taken, 0 before the first and when they were dropped; `count`
    how many steps there are, and `groups` the digests of those that they used.
    """

    def __init__(self, node: Node, learner: LocalLearner, pool: GroupPool, settings: SiteSettings) -> None:
        self._node = node
        self._learner = learner
        self._pool = pool
        self._settings = settings
        self._start: Weights = {}  # the weights with which the steps ahead began
        self.number, self.count, self.groups = 0, 0, list[bytes]()

    def drop(self) -> None:
        """Forget the steps: those ahead will not be sent, and others have been."""
        if self._start and self.count:
            self._node.telemetry.event("steps-dropped", number=self.number, steps=self.count)
        self.number, self.count, self.groups, self._start = 0, 0, [], {}

    async def begin(self, number: int, inner: State, weights: Weights) -> None:
        """Begin a round with the shared weights and the site's own state."""
        self.drop()
        await self._node.run_sync(lambda: self._learner.restore(begin_round(inner, weights)))
        self.number = number

    async def state(self) -> State:
        """Return the state of the learner."""
        state: State = await self._node.run_sync(self._learner.state)
        return state

    async def take(self, opening: RoundManifest) -> None:
        """Take the steps that the present round lacks, until shortly before its end, or until they have used as many
        groups as a contribution can name.
        """
        node, settings = self._node, self._settings
        deadline = node.run.beacon.round_time(opening.closes) - settings.upload_seconds
        turns = {turn_of(self.number, opening.rules.delay)}
        while not self._are_all_taken(opening) and node.time.now() < deadline:
            await self._step(opening, turns)

    async def go_ahead(self, opening: RoundManifest, start: Weights, used: frozenset[bytes]) -> None:
        """Take the steps of the round after the present one, from where its own ended (FP32 weights). Only groups that
        belong to this site in both rounds, without those of its contribution, are used, so no other site may have used
        them meanwhile. The task may be cancelled between two steps.
        """
        self.drop()
        self.number, self._start = opening.number + 2, start
        turns = {turn_of(number, opening.rules.delay) for number in (opening.number + 1, self.number)}
        while not self._are_all_taken(opening):
            await self._step(opening, turns, used, ahead=True)

    async def settle(self, manifest: RoundManifest, shared: SharedState) -> None:
        """Move the steps ahead onto the state after the round before them, or drop them. The weights become fl(shared +
        fl(local - start)). The steps are dropped if there are none, if the manifest's rules have no delay, or if a
        group that they used belongs to another worker now, or they are too many.
        """
        node, start = self._node, self._start
        turn, worker = turn_of(self.number, manifest.rules.delay), node.key.public
        is_dealt = all(owner(manifest.run, turn, group, manifest.workers) == worker for group in self.groups)
        is_dealt = is_dealt and len(self.groups) <= most_groups(len(manifest.workers))
        if not start or not self.count or not manifest.rules.delay or not is_dealt:
            self.drop()
            return
        await node.run_sync(self._move, shared.weights, start)
        self._start = {}

    def _move(self, shared: Weights, start: Weights) -> None:
        state = self._learner.state()
        moved_masters = {name: shared[name] + (tensor - start[name]) for name, tensor in masters(state).items()}
        self._learner.restore(with_masters(state, moved_masters))

    def _are_all_taken(self, opening: RoundManifest) -> bool:
        """Return whether the rules, or the groups that a contribution can name, allow no further step."""
        groups = len(self.groups) + self._settings.groups_per_step
        return self.count >= opening.rules.local_steps or groups > most_groups(len(opening.workers))

    async def _step(
        self, opening: RoundManifest, turns: set[int], used: frozenset[bytes] = frozenset(), *, ahead: bool = False
    ) -> None:
        """Take a step with groups that belong to this site in each of some turns, without `used` ones; wait if there
        are none.
        """
        node, settings = self._node, self._settings
        await self._pool.read_inbox(opening.version)
        dealt = self._pool.dealt(turns, opening.workers, node.key.public, used.union(self.groups))
        digests = dealt[: settings.groups_per_step]
        if len(digests) < settings.groups_per_step:
            await trio.sleep(settings.poll_seconds)
            return
        begin = node.time.now()
        with trio.CancelScope(shield=True):  # a step that the learner has taken counts
            self.groups += digests
            try:
                figures: StepFigures = await node.run_sync(self._learner.step, self._pool.groups(digests))
            except ValueError as error:
                node.telemetry.event("step-refused", error=str(error), groups=len(digests))
                return
            self.count += 1
        node.telemetry.event(
            "local-step",
            number=self.number,
            step=self.count,
            ahead=int(ahead),
            seconds=node.time.now() - begin,
            loss=figures.loss,
            grad_norm=figures.grad_norm,
            reward=figures.reward,
        )
