"""The demo's cheat: a miner that makes a different kind of false rollout in every window, and follows the rules
otherwise.

It is a program of its own, put together from the miner's parts as anybody could; no part of the node knows of it.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from grailnode.engine.compute import Compute
from grailnode.engine.torch_engine import TorchEngine
from grailnode.node import processes
from grailnode.node.settings import miner_settings
from protocol import limits, paths
from protocol.digest import Weights
from protocol.errors import ProtocolError
from protocol.judging.verdict import Reason, Verdict
from protocol.rollout.batch import Commitment, Group, Rollout, open_group
from roles.miner.miner import Miner, MinerSettings
from roles.miner.produce import HonestProducer, MiningWindow
from roles.node.identity import Node
from roles.policy.assignment import Assignment, Task
from roles.policy.follower import Follower
from roles.ports import Generation, StoreError
from roles.records import fetch_record

KINDS = ("own-noise", "perturbed-model", "edited-tokens", "false-reward", "copied", "constant-sketch")
"""What it does in window w: KINDS[w % 6]."""

DUE_REASON = {
    "own-noise": Reason.SAMPLING,
    "perturbed-model": Reason.SKETCH,
    "edited-tokens": Reason.SAMPLING,
    "false-reward": Reason.REWARD,
    "copied": Reason.COPIED,
    "constant-sketch": Reason.SKETCH,
}
"""The reason that a validator has to give for each."""

_PERTURBATION = 0.05  # of every weight: about what a 4-bit copy is off
_REDRAWS = 10  # of a group whose own noise gave the due tokens by chance
_LOOK_BACK = 8  # windows in which to look for somebody else's work


class KeepingEngine(TorchEngine):
    """An engine that keeps the weights it was given."""

    weights: Weights

    async def stage(self, version: int, weights: Weights) -> None:
        """Stage as usual, and keep the weights."""
        await super().stage(version, weights)
        self.weights = weights


class Cheater(HonestProducer):
    """Makes false groups, in a new way every window."""

    engine: KeepingEngine

    def __init__(self, task: Task, engine: KeepingEngine, node: Node, compute: Compute) -> None:
        super().__init__(task, engine)
        self._node = node
        self._random = random.Random(node.key.public)  # noqa: S311 - a cheat needs no good randomness
        self._other = TorchEngine(compute.model, run_sync=node.run_sync)

    async def produce(self, turn: MiningWindow, indices: Sequence[int]) -> list[Group]:
        """False groups of these numbers."""
        kind = KINDS[turn.window % len(KINDS)]
        assignments = self.assignments(turn, indices)
        if kind == "perturbed-model":
            return await self._with_perturbed_model(turn, indices)
        if kind == "copied":
            copies = await self._copies(turn, indices)
            if copies:
                return copies
        if kind in ("own-noise", "copied"):
            return await self._with_own_noise(turn, assignments)
        groups = await super().produce(turn, indices)
        if kind == "edited-tokens":
            return [await self._edited(turn, *pair) for pair in zip(groups, assignments, strict=True)]
        return [self._falsified(group, kind) for group in groups]

    async def _with_perturbed_model(self, turn: MiningWindow, indices: Sequence[int]) -> list[Group]:
        """Rollouts of a policy that is a little off, sketch and all."""
        if self._other.version != turn.version:
            noise = torch.Generator().manual_seed(turn.version)
            weights = {
                name: tensor * (1 + _PERTURBATION * torch.randn(tensor.shape, generator=noise)).to(tensor.dtype)
                for name, tensor in self.engine.weights.items()
            }
            await self._other.stage(turn.version, weights)
            await self._other.commit()
        return await HonestProducer(self.task, self._other).produce(turn, indices)

    async def _with_own_noise(self, turn: MiningWindow, assignments: Sequence[Assignment]) -> list[Group]:
        """The right policy, but samples of the miner's choosing (drawn again where they are the due ones by chance)."""
        due = [_tokens(done) for done in await self.generate(assignments)]
        groups: dict[int, Group] = {}
        for _ in range(_REDRAWS):
            left = [item for item in assignments if item.index not in groups]
            seeded = [replace(item, seeds=tuple(self._random.randbytes(16) for _ in item.seeds)) for item in left]
            for assignment, done in zip(left, await self.generate(seeded), strict=True):
                if _tokens(done) != due[assignments.index(assignment)]:
                    groups[assignment.index] = self.group(turn, assignment, await self.rollouts(turn, assignment, done))
            if len(groups) == len(assignments):
                break
        honest = await super().produce(turn, [item.index for item in assignments if item.index not in groups])
        by_index = {item.index: item for item in assignments}
        for group in honest:  # a policy so sure of itself that any noise gives the same: one token has to change
            groups[group.index] = await self._edited(turn, group, by_index[group.index])
        return [groups[item.index] for item in assignments]

    async def _edited(self, turn: MiningWindow, group: Group, assignment: Assignment) -> Group:
        """One token of one rollout made a better one, with the sketch that the right policy gives for it."""
        rollouts = list(group.rollouts)
        tokens = list(rollouts[0].tokens)
        tokens[0] = self._random.choice([token for token in self._digits() if token != tokens[0]])
        forward = (await self.engine.forward([assignment.prompt], [tuple(tokens)]))[0]
        edited = Generation(tuple(tokens), forward.hidden, ())
        rollouts[0] = (await self.rollouts(turn, assignment, [edited]))[0]
        return group.model_copy(update={"rollouts": tuple(rollouts)})

    def _digits(self) -> list[int]:
        return [token for digit in "123456789" for token in self.task.tokenizer.encode(digit)]

    def _falsified(self, group: Group, kind: str) -> Group:
        """Rewards turned round, or a sketch of no work at all."""

        def falsify(rollout: Rollout) -> Rollout:
            if kind == "false-reward":
                return rollout.model_copy(update={"reward": 1.0 - rollout.reward})
            return rollout.model_copy(update={"sketch": bytes(len(rollout.sketch))})

        return group.model_copy(update={"rollouts": tuple(falsify(rollout) for rollout in group.rollouts)})

    async def _copies(self, turn: MiningWindow, indices: Sequence[int]) -> list[Group]:
        """Another miner's groups under this miner's name: the newest that a validator has accepted."""
        for window in range(turn.window - 1, max(-1, turn.window - _LOOK_BACK), -1):
            for validator in self._node.authority.validators:
                for verdict in await self._verdicts(validator, window):
                    if verdict.miner != turn.miner and all(judgement.accepted for judgement in verdict.judgements):
                        try:
                            return await self._copy(turn, indices, window, verdict.miner)
                        except (StoreError, ProtocolError):
                            continue
        return []

    async def _verdicts(self, validator: bytes, window: int) -> list[Verdict]:
        try:
            items = self._node.store.list(paths.verdicts(validator, window))
            return [(await fetch_record(self._node, Verdict, item.path)).record async for item in items]
        except (StoreError, ProtocolError):
            return []

    async def _copy(self, turn: MiningWindow, indices: Sequence[int], window: int, other: bytes) -> list[Group]:
        commitment = (await fetch_record(self._node, Commitment, paths.commitment(other, window))).record
        batch = await self._node.store.get(paths.batch(other, window, commitment.batch), limits.MAX_BATCH_BYTES)
        groups = []
        for index in indices:
            offset, size = commitment.extent(index % len(commitment.groups))
            source = open_group(batch[offset : offset + size], commitment, index % len(commitment.groups))
            mine = {"window": turn.window, "version": turn.version, "miner": turn.miner, "index": index}
            groups.append(source.model_copy(update=mine))
        return groups


def _tokens(group: Sequence[Generation]) -> list[tuple[int, ...]]:
    return [item.tokens for item in group]


async def run_cheater(node: Node, task: Task, compute: Compute, settings: MinerSettings) -> None:
    """Cheat for ever."""
    engine = KeepingEngine(compute.model, run_sync=node.run_sync, max_batch_tokens=compute.max_batch_tokens)
    follower = await Follower.open(node)
    producer = Cheater(task, engine, node, compute)
    await Miner(node, follower, engine, producer, settings).run()


async def _work(node: Node, launch: processes.Launch) -> None:
    task, compute = await processes.join_run(node, launch.config, launch.name)
    await run_cheater(node, task, compute, miner_settings(launch.config))


def main(launch: processes.Launch) -> None:
    """Run the cheat's process until it is told to stop."""
    processes.main(launch, _work)
