"""A learner on several ranks: rank 0 runs the training process and calls it, the other ranks make the same calls.

Each rank holds some rows of every tensor, so all ranks have to take part in each operation, in the same order. Rank 0
therefore broadcasts the name of a method and its argument, and then runs it; the other ranks wait for such calls. There
are two channels, each followed in a thread of its own: steps change the tensors, and reads gather them or save them, so
that a version and a checkpoint can be written to the disk while the gradients of the next step are computed. The
tensors of a version are gathered one by one, as they are published; masters and moments are not: each rank writes its
rows into the state of its host.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any, Literal

import torch
import trio
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from grailnode.ranks.rank_group import RankGroup
from protocol.chain import safetensors
from protocol.digest import Weights
from protocol.quantization import SCALE, Precision, published_tensors
from roles.policy.causal_model import CausalModel
from roles.policy.layer_weights import PartialWeights
from roles.ports import ObjectStore
from roles.trainer.learn.checkpoint_files import delete_folders
from roles.trainer.learn.learner import (
    Gradients,
    Learner,
    LearnerSettings,
    Pass,
    PassSums,
    StepReport,
    reference_weights,
)
from roles.trainer.learn.optimizer import STEPS, MasterOptimizer, check_state
from roles.trainer.learn.rounded_weights import round_straight_through
from roles.trainer.learn.state_rows import SavedRows, Share, StateRows
from roles.trainer.tensor_shards import RunSync, WeightsHash, WrittenWeights, delete_below, shard_path
from roles.trainer.verified_batch import VerifiedGroup


class ShardedWeights(PartialWeights):
    """The weights of a model on all ranks, of which this process has one's shards: float32 if they are `trained`, and
    BF16 otherwise. The dtype is that of computing, the precision that of publishing. ValueError if a weight has no
    dimension along which it could be divided.
    """

    def __init__(
        self, model: CausalModel, group: RankGroup, dtype: torch.dtype, precision: Precision = "bf16", *, trained: bool
    ) -> None:
        self._dtype = dtype
        self._precision = precision
        self._shapes = model.shapes
        part_of = {name: next(filter(name.startswith, model.layers), "") for name in self._shapes}
        for name, shape in self._shapes.items():
            if not shape:
                raise ValueError(f"{name} is a single number, and cannot be divided among ranks")
        low = trained and dtype == torch.bfloat16 and precision == "bf16"  # rounded before they are gathered
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if low else None,
            reduce_dtype=torch.float32 if low else None,
            cast_forward_inputs=False,
        )
        self._parts: dict[str, _Part] = {}
        for prefix in (*model.layers, ""):  # the root comes last, and contains the layers
            part = self._parts[prefix] = _Part()
            for number, inner in enumerate(self._parts.values() if not prefix else ()):
                if inner is not part:
                    part.add_module(f"part_{number}", inner)
            for name in (name for name, own in part_of.items() if own == prefix):
                stored = torch.float32 if trained else torch.bfloat16
                weight = torch.empty(self._shapes[name], dtype=stored, device=group.device)
                part.register_parameter(_attribute(name), nn.Parameter(weight, requires_grad=trained))
            fully_shard(part, mesh=group.mesh, mp_policy=policy)
            assert isinstance(part, FSDPModule)
            part.set_gradient_divide_factor(1.0)  # gradients are added and not averaged: the loss is a sum
            part.set_force_sum_reduction_for_comms(True)
        self._part_of = {name: self._parts[prefix] for name, prefix in part_of.items()}
        self._shards = {name: part.parameter(name) for name, part in self._part_of.items()}

    def __getitem__(self, name: str) -> Tensor:
        """Return a weight of the part that is being computed, in the dtype of computing."""
        return round_straight_through(name, self._part_of[name].parameter(name), self._precision, self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def within(self, prefix: str, compute: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self._parts[prefix](compute, *arguments, **options)

    @torch.no_grad()
    def shards(self) -> dict[str, Tensor]:
        """Return this rank's rows of each weight; to change them is to change the weights."""
        return {name: shard.to_local() for name, shard in self._shards.items()}  # type: ignore[attr-defined]

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """Return this rank's rows of the gradients of all passes since `forget_gradients`: float32."""
        return {
            name: torch.zeros_like(shard) if (gradient := self._shards[name].grad) is None else gradient.to_local()  # type: ignore[attr-defined]
            for name, shard in self.shards().items()
        }

    def gather(self, name: str, rows: Tensor) -> Tensor:
        """Return on each rank the whole of a tensor of which each has rows as of a weight."""
        shard: Any = self._shards[name]
        outline = {"shape": shard.shape, "stride": shard.stride()}
        return DTensor.from_local(rows, shard.device_mesh, shard.placements, **outline).full_tensor()

    def forget_gradients(self) -> None:
        """Begin a new sum of gradients."""
        for shard in self._shards.values():
            shard.grad = None


class _Part(nn.Module):
    """Weights that are gathered together."""

    def parameter(self, name: str) -> nn.Parameter:
        """Return the shard of a weight, or while it is gathered the weight."""
        parameter: nn.Parameter = getattr(self, _attribute(name))
        return parameter

    def forward(self, compute: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Compute something with the weights; `fully_shard` gathers them before and frees them afterwards."""
        return compute(*arguments, **options)


def _attribute(name: str) -> str:
    """Return the name of a weight's attribute, which may have no dots."""
    return "weight_" + name.replace(".", "/")


Call = tuple[Literal["gradients", "update", "restore", "load", "read", "publish", "save"], Any]
"""What all ranks do next, and with what."""


class ShardedLearner(Learner):
    """A learner on several ranks, of which only that of rank 0 is called. Each other rank calls `follow`.

    The passes of a step follow from the settings. Pass i is taken by rank i modulo the number of ranks, so that the
    passes of one moment have about as many tokens. A rank without a pass takes one that has no weight, because the
    others need its weights.

    Training begins with the weights of rank 0; the others get None, and receive them. The first `local_ranks`, by
    default all, are on rank 0's host and share its state.
    """

    def __init__(
        self,
        model: CausalModel,
        weights: Mapping[str, Tensor] | None,
        settings: LearnerSettings,
        group: RankGroup,
        dtype: torch.dtype = torch.float32,
        precision: Precision = "bf16",
        local_ranks: int | None = None,
    ) -> None:
        super().__init__(model, {}, settings, group.device, dtype, precision)
        self._group = self._peers = group
        self._local_ranks = local_ranks or group.count
        self._reading = Lock()
        self._shapes = {name: torch.Size(shape) for name, shape in model.shapes.items()}
        self._sharded = ShardedWeights(model, group, dtype, precision, trained=True)
        masters, own_rows = self._sharded.shards(), lambda whole: whole[group.rows(len(whole))]
        self._optimizer = MasterOptimizer(masters, settings.optimizer, group.add, self._sharded.gather, own_rows)
        self._receive(self._optimizer.masters, weights, self._first_master)
        self._sharded_reference: Mapping[str, Tensor] = {}
        if settings.loss.has_reference:
            reference = self._sharded_reference = ShardedWeights(model, group, dtype, trained=False)
            first = None if weights is None else reference_weights(settings, weights)
            self._receive(reference.shards(), first, self._reference_weight)

    def gradients(self, groups: Sequence[VerifiedGroup]) -> Gradients:
        """Compute the gradients of these groups on all ranks; return this rank's rows."""
        self._tell(("gradients", tuple(groups)))
        self._on_all_ranks(self._scales, self._group.steps)  # a pass that fails leaves weights gathered
        self._sharded.forget_gradients()
        figures = super().gradients(groups).figures
        return Gradients(self._sharded.gradients(), figures)

    def update(self, gradients: Gradients) -> StepReport:
        self._tell(("update", None))
        report = super().update(gradients)
        self._group.wait()  # rank 0 may read the others' rows next
        return report

    def state_rows(self) -> StateRows:
        """Return this rank's rows of masters and moments."""
        return self._rows(self._optimizer.tensors)

    async def put_version(self, state: ObjectStore, folder: str, run_sync: RunSync, shard_bytes: int) -> WrittenWeights:
        group, own = self._group, WeightsHash()
        if group.rank == 0:
            await run_sync(group.broadcast, group.reads, ("publish", (folder, shard_bytes)))
        sizes = self.view_source().sizes
        shards, total = safetensors.shards(sizes, shard_bytes), sum(sizes.values())
        if group.rank % self._local_ranks == 0:
            await delete_below(state, folder)  # by a process that was killed, and may have divided them otherwise
        done = 0
        for number, names in enumerate(shards):
            # Each host has a contiguous range of the files, of about as many bytes as another's.
            host = done * (group.count // self._local_ranks) // total
            done += sum(sizes[name] for name in names)
            tensors = [await run_sync(partial(self._gather, names, view=True, target=host * self._local_ranks))]
            if tensors[0]:
                weights = await run_sync(own.add, dict(zip(names, tensors[0], strict=True)))
                file = [await run_sync(safetensors.write, weights)]
                del weights
                await state.put(shard_path(folder, number), file[0])
                await run_sync(file.clear)
            await run_sync(tensors.clear)
        digests = await run_sync(group.exchange, own.digest(), group.reads)  # all files are on the disks
        return WrittenWeights(len(shards), tuple(digests[:: self._local_ranks]))

    async def save(
        self, state: ObjectStore, run_sync: RunSync, shard_bytes: int, folder: str, previous: str
    ) -> tuple[list[int], int]:
        group = self._group
        if group.rank == 0:
            await run_sync(group.broadcast, group.reads, ("save", (shard_bytes, folder, previous)))
        await run_sync(self._on_all_ranks, self._scales, group.reads)  # one that has none is refused on all of them
        files, _ = await super().save(state, run_sync, shard_bytes, folder, previous)
        return await run_sync(group.exchange, files[0], group.reads), self._local_ranks

    async def load(self, state: ObjectStore, saved: SavedRows, run_sync: RunSync) -> None:
        await run_sync(self._tell, ("load", saved))
        await super().load(state, saved, run_sync)

    def state(self) -> dict[str, Tensor]:
        tensors = {name: self._read([name], view=False)[0] for name in self._optimizer.tensors}
        return tensors | {STEPS: torch.tensor(self.steps, dtype=torch.int64)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        own = self._optimizer.tensors
        check_state(state, {name: (self._shape(name), tensor.dtype) for name, tensor in own.items()})
        self._tell(("restore", int(state[STEPS])))
        self._take_over(int(state[STEPS]), state)

    def _take_over(self, steps: int, state: Mapping[str, Tensor] | None) -> None:
        """Take over this rank's rows of a state that rank 0 has."""
        self._receive(self._optimizer.tensors, state, lambda _, tensor: tensor)
        self._optimizer.steps = steps
        self._group.wait()

    def _weights(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        return self._sharded, {}

    def _reference_weights(self) -> Mapping[str, Tensor]:
        return self._sharded_reference

    def _take_passes(
        self, weights: Mapping[str, Tensor], reference: Mapping[str, Tensor], passes: Sequence[Pass]
    ) -> list[PassSums]:
        group = self._group
        sums: list[PassSums] = []
        for first in range(0, len(passes), group.count):
            if first + group.rank < len(passes):
                sums += super()._take_passes(weights, reference, [passes[first + group.rank]])
            else:
                samples, _ = passes[first]
                super()._take_passes(weights, reference, [(samples[:1], [0.0])])
        loss, clipped_tokens, divergence, entropy = (
            group.add([math.fsum(column)]) for column in zip((0.0,) * 4, *sums, strict=True)
        )
        return [(loss, clipped_tokens, divergence, entropy)]

    def _published(self, names: Sequence[str]) -> dict[str, Tensor]:
        return dict(zip(names, self._read(names, view=True), strict=True))

    def _read(self, names: Sequence[str], *, view: bool) -> list[Tensor]:
        """Return whole tensors on rank 0: of a version, or masters and moments; none on the other ranks."""
        with self._reading:
            if self._group.rank == 0:
                self._group.broadcast(self._group.reads, ("read", (names, view)))
            return self._gather(names, view=view)

    def _gather(self, names: Sequence[str], *, view: bool, target: int = 0) -> list[Tensor]:
        """Return whole tensors on one rank, and none on the others; all ranks call this."""
        group = self._group
        if view:
            masters = self._optimizer.masters
            own = self._on_all_ranks(partial(published_tensors, masters, self._precision, names), group.reads)
        else:
            own = {name: self._optimizer.tensors[name].cpu().contiguous() for name in names}
        gathered = [group.gather(own[name], self._shape(name)[0], target) for name in names]
        return [tensor for tensor in gathered if tensor is not None]

    def _on_all_ranks(self, compute: Callable[[], Weights], channel: "dist.ProcessGroup") -> Weights:
        """Return what this rank computes; raise a ValueError that any rank has on all of them."""
        try:
            own, error = compute(), ""
        except ValueError as refusal:
            own, error = {}, str(refusal)
        for text in filter(None, self._group.exchange(error, channel)):
            raise ValueError(text)
        return own

    def _shape(self, name: str) -> torch.Size:
        """Return the shape of a whole tensor of the state; of scales, that of their matrix, with as many rows."""
        weight = name.rpartition("/")[2]
        return self._shapes[weight if weight in self._shapes else weight.removesuffix(SCALE)]

    def _rows(self, tensors: Mapping[str, Tensor]) -> StateRows:
        return StateRows(tensors, {name: self._shape(name) for name in tensors}, self._group)

    def _receive(
        self, own: Mapping[str, Tensor], whole: Mapping[str, Tensor] | None, prepare: Callable[[str, Tensor], Tensor]
    ) -> None:
        """Fill this rank's rows of tensors from the whole ones, which rank 0 has."""
        rows = self._rows(own)
        for name in own:
            rows.take({name: prepare(name, self._group.send(None if whole is None else whole[name], 0))}, Share())

    def _tell(self, call: Call) -> None:
        """Have the other ranks take part in what rank 0 does next; on these this does nothing."""
        if self._group.rank == 0:
            self._group.broadcast(self._group.steps, call)

    async def follow(self, state: ObjectStore, *, sweeps: bool = False) -> None:
        """Do on another rank what rank 0 does, until its connection is closed, with the state of this host. One rank of
        each host but the first `sweeps`: it deletes what was saved before.
        """
        in_thread = partial(trio.to_thread.run_sync, abandon_on_cancel=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_thread, self._follow_reads, state, sweeps)
            await in_thread(self._follow_steps, state)
            nursery.cancel_scope.cancel()

    def _follow_steps(self, state: ObjectStore) -> None:
        """Take part in each call of the channel of steps.

        Errors that rank 0 has as well (groups without tokens, gradients that are not finite) are not raised here: they
        change nothing on any rank, and rank 0 raises them to its caller.
        """
        gradients: Gradients | None = None  # that the next update uses; None after an update, or if there were none
        for method, argument in self._calls(self._group.steps):
            match method:
                case "gradients":
                    gradients = None
                    with suppress(ValueError):
                        gradients = self.gradients(argument)
                case "update":
                    assert gradients is not None
                    with suppress(ValueError):
                        self.update(gradients)
                case "restore":
                    self._take_over(argument, None)
                case "load":
                    trio.from_thread.run(self.load, state, argument, trio.to_thread.run_sync)

    def _follow_reads(self, state: ObjectStore, sweeps: bool) -> None:
        """Take part in each call of the channel of reads."""
        for method, argument in self._calls(self._group.reads):
            with suppress(ValueError):  # rank 0 raises it
                match method:
                    case "read":
                        self._read(argument[0], view=argument[1])
                    case "publish":
                        folder, shard_bytes = argument
                        trio.from_thread.run(self.put_version, state, folder, trio.to_thread.run_sync, shard_bytes)
                    case "save":
                        if sweeps:
                            trio.from_thread.run(delete_folders, state, {*argument[1:]})
                        trio.from_thread.run(self.save, state, trio.to_thread.run_sync, *argument)

    def _calls(self, channel: "dist.ProcessGroup") -> Iterator[Call]:
        """Yield the calls of rank 0 until its connection is closed."""
        while True:
            try:
                call = self._group.broadcast(channel)
            except RuntimeError:  # torch has no narrower one for a peer that is gone
                return
            yield call
