"""The demo's cheat: a miner that submits another kind of false rollout in every window, and follows the protocol
otherwise.

It is built from the parts of a miner, as any attacker could build it. Only the demo imports it, and starts it as a
process of a node: `grailnode.node.processes.main` runs the process body that it gets as an argument.
"""

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from grailnode.engine.compute import Compute
from grailnode.engine.torch_engine import TorchEngine
from grailnode.node import bodies, processes
from grailnode.node.process_launch import Launch
from protocol import limits, paths
from protocol.chain.manifest import Manifest
from protocol.digest import Weights
from protocol.encoding import REWARD_UNIT
from protocol.errors import ProtocolError
from protocol.judging.verdict import Verdict
from protocol.patch import apply
from protocol.quantization import dequantize
from protocol.rollout.batch import Commitment, Group, Rollout, open_group
from roles.miner.miner import Miner
from roles.miner.miner_settings import MinerSettings
from roles.miner.produce import HonestProducer, MiningWindow
from roles.node.identity import Node
from roles.policy.assignment import Assignment, Task
from roles.policy.follower import Follower
from roles.ports import Generation, StoreError
from roles.records import fetch_record

KINDS = ("own-noise", "perturbed-model", "edited-tokens", "false-reward", "copied", "constant-sketch")
"""The kinds of false rollouts; window w gets KINDS[w % 6]."""

_PERTURBATION = 0.05  # relative, of every weight: about the error of a 4-bit copy
_COPY_WINDOWS = 8  # earlier windows that are searched for groups to copy


class InspectableEngine(TorchEngine):
    """A torch engine whose staged weights can be read."""

    weights: Weights

    async def stage(self, version: int, weights: Weights) -> None:
        await super().stage(version, weights)
        self.weights = weights

    async def stage_patch(self, version: int, patch: bytes, manifest: Manifest) -> None:
        await super().stage_patch(version, patch, manifest)
        self.weights = await self._run_sync(apply, self.weights, patch)


class Cheater(HonestProducer):
    """Produces false groups, of another kind in every window."""

    engine: InspectableEngine

    def __init__(self, task: Task, engine: InspectableEngine, node: Node, compute: Compute) -> None:
        super().__init__(task, engine)
        self._node = node
        self._random = random.Random(node.key.public)  # noqa: S311 - nothing secret
        self._perturbed = TorchEngine(compute.model, run_sync=node.run_sync)

    async def produce(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        kind = KINDS[mining_window.window % len(KINDS)]
        assignments = self.assignments(mining_window, indices)
        if kind == "perturbed-model":
            if self._perturbed.version != mining_window.version:
                weights = await self._node.run_sync(perturbed, self.engine.weights, mining_window.version)
                await self._perturbed.stage(mining_window.version, weights)
                await self._perturbed.commit()
            return await HonestProducer(self.task, self._perturbed).produce(mining_window, indices)
        if kind == "copied" and (copies := await self._copies(mining_window, indices)):
            return copies
        if self.task.run.episode is not None and kind in ("own-noise", "copied", "edited-tokens"):
            return await self._produce_episodes(mining_window, [self._reseeded(item) for item in assignments])
        if kind in ("own-noise", "copied"):
            return await self._own_noise_groups(mining_window, assignments)
        groups = await super().produce(mining_window, indices)
        if kind == "edited-tokens":
            return [await self._edit(mining_window, *pair) for pair in zip(groups, assignments, strict=True)]
        return [self._falsify(group, kind) for group in groups]

    async def _own_noise_groups(self, mining_window: MiningWindow, assignments: Sequence[Assignment]) -> list[Group]:
        """Sample the right policy with the miner's own noise; edit groups that still have the assigned tokens."""
        honest = await super().produce(mining_window, [item.index for item in assignments])
        drawn = await self.generate(mining_window, [self._reseeded(item) for item in assignments])
        groups = []
        for assignment, group, generations in zip(assignments, honest, drawn, strict=True):
            if [item.tokens for item in generations] == [item.tokens for item in group.rollouts]:
                groups.append(await self._edit(mining_window, group, assignment))
            else:
                rollouts = await self.rollouts(mining_window, assignment, generations)
                groups.append(self.group(mining_window, assignment, rollouts))
        return groups

    def _reseeded(self, assignment: Assignment) -> Assignment:
        return replace(assignment, seeds=tuple(self._random.randbytes(16) for _ in assignment.seeds))

    async def _edit(self, mining_window: MiningWindow, group: Group, assignment: Assignment) -> Group:
        """Replace one token of one rollout, with the sketch that the right policy gives for it."""
        rollouts = list(group.rollouts)
        tokens = list(rollouts[0].tokens)
        digits = [token for digit in "123456789" for token in self.task.tokenizer.encode(digit)]
        tokens[0] = self._random.choice([token for token in digits if token != tokens[0]])
        forward = (await self.engine.forward([assignment.prompt], [tuple(tokens)]))[0]
        edited = Generation(tuple(tokens), forward.hidden, ())
        rollouts[0] = (await self.rollouts(mining_window, assignment, [edited]))[0]
        return group.model_copy(update={"rollouts": tuple(rollouts)})

    def _falsify(self, group: Group, kind: str) -> Group:
        def falsify(rollout: Rollout) -> Rollout:
            if kind == "false-reward":
                return rollout.model_copy(update={"reward": REWARD_UNIT - rollout.reward})
            return rollout.model_copy(update={"sketch": bytes(len(rollout.sketch))})

        return group.model_copy(update={"rollouts": tuple(falsify(rollout) for rollout in group.rollouts)})

    async def _copies(self, mining_window: MiningWindow, indices: Sequence[int]) -> list[Group]:
        """Return another miner's groups under this miner's key: the newest that a validator has accepted."""
        for window in range(mining_window.window - 1, max(-1, mining_window.window - _COPY_WINDOWS), -1):
            for validator in self._node.authority.validators:
                for verdict in await self._verdicts(validator, window):
                    is_accepted = all(judgement.accepted for judgement in verdict.judgements)
                    if is_accepted and verdict.miner != mining_window.miner:
                        with suppress(StoreError, ProtocolError):
                            return await self._copy(mining_window, indices, window, verdict.miner)
        return []

    async def _verdicts(self, validator: bytes, window: int) -> list[Verdict]:
        try:
            items = self._node.store.list(paths.verdicts(validator, window))
            return [(await fetch_record(self._node, Verdict, item.path)).record async for item in items]
        except (StoreError, ProtocolError):
            return []

    async def _copy(
        self, mining_window: MiningWindow, indices: Sequence[int], window: int, other: bytes
    ) -> list[Group]:
        commitment = (await fetch_record(self._node, Commitment, paths.commitment(other, window))).record
        batch = await self._node.store.get(paths.batch(other, window, commitment.batch), limits.MAX_BATCH_BYTES)
        place = {"window": mining_window.window, "version": mining_window.version, "miner": mining_window.miner}
        groups = []
        for index in indices:
            offset, size = commitment.extent(index % len(commitment.groups))
            source = open_group(batch[offset : offset + size], commitment, index % len(commitment.groups))
            groups.append(source.model_copy(update={**place, "index": index}))
        return groups


def perturbed(weights: Weights, seed: int) -> Weights:
    noise = torch.Generator().manual_seed(seed)
    return {
        name: tensor * (1 + _PERTURBATION * torch.randn(tensor.shape, generator=noise)).to(tensor.dtype)
        for name, tensor in dequantize(weights).items()
    }


async def run_cheater(node: Node, task: Task, compute: Compute, settings: MinerSettings) -> None:
    engine = InspectableEngine(compute.model, run_sync=node.run_sync, max_batch_tokens=compute.max_batch_tokens)
    follower = await Follower(node).open()
    producer = Cheater(task, engine, node, compute)
    await Miner(node, follower, engine, producer, settings).run()


async def _cheat(node: Node, launch: Launch) -> None:
    task, compute = await bodies.join_run(node, launch.config, launch.name)
    await run_cheater(node, task, compute, launch.config.miner)


def main(launch: Launch) -> None:
    processes.main(launch, _cheat)
