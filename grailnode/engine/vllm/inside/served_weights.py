"""The weights in the memory of the serving model: read back as the checkpoint's tensors, changed in place, rolled back.

States: unverified (after loading, or after a whole checkpoint was written), verified (the digests of all tensors are
those of a version), poisoned (a change failed half-way and could not be undone). Only verified weights have a version,
and a completion is a rollout only if every one of its tokens was sampled while the same version was verified.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from grailnode.engine.vllm.inside.tensor_map import Piece, Placement, TensorMap
from protocol.digest import tensor_digest, weights_digest

_LOW_BITS = 0xFFFF


class ServedWeightsError(Exception):
    """The weights cannot be read, staged or changed; the message says what is wrong."""


class PoisonedError(ServedWeightsError):
    """The weights are damaged, and must be loaded again."""


class DifferentWeightsError(ServedWeightsError):
    """The weights read back are not those of a version.

    Attributes:
        tensors: the names of those that differ; none if only the digest of all tensors together is known.
    """

    def __init__(self, version: int, tensors: Sequence[str]) -> None:
        which = f" in {len(tensors)} tensors: {', '.join(tensors)}" if tensors else ""
        super().__init__(f"the weights read back from the engine differ from version {version}{which}")
        self.tensors = tuple(tensors)


Gather = Callable[[Tensor], None]
"""Completes a tensor, int16 on the CPU, in place with the parts of all ranks; elements of other ranks are 0. Bytes that
several ranks have become the largest of them.
"""


class Signal(IntEnum):
    """What a rank tells the others whenever they read a tensor together; all of them act on the largest."""

    GO_ON = 0
    CANCELLED = 1
    FAILED = 2


@dataclass
class ElementChange:
    """New values for elements of one parameter. After `swap` it holds the old ones, so that swapping again undoes it.

    Attributes:
        target: int [S], the parameter's storage.
        places: int32 or int64 [N], distinct, into the storage.
        values: int [N] of the target's dtype.
        overwritten: the old elements while a swap is under way.
    """

    target: Tensor
    places: Tensor
    values: Tensor
    overwritten: Tensor | None = None

    def swap(self) -> None:
        """Exchange the elements in the parameter with the values."""
        # Kept on the object before the write: if the write fails half-way, `undo` has the old elements.
        self.overwritten = self.target[self.places]
        self.target[self.places] = self.values
        self.values, self.overwritten = self.overwritten, None

    def undo(self) -> None:
        """Bring the old elements back after a swap, or after one that failed."""
        # A swap that ended has its old elements in `values`; one that failed has them in `overwritten`.
        if self.overwritten is None:
            self.swap()
        else:
            self.target[self.places] = self.overwritten


@dataclass
class StagedVersion:
    """A version that was checked and can be committed.

    Attributes:
        version: its number.
        base: digest of the weights that the changes are for; None for a whole checkpoint, which fits any.
        digest: of all its weights; digests: BLAKE3 of each tensor.
        changes: of single elements.
        tensors: BF16, tensors to be written whole.
    """

    version: int
    base: bytes | None
    digest: bytes
    digests: dict[str, bytes]
    changes: list[ElementChange] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def changed_elements(self) -> int:
        """Number of changed elements on this rank, without those of whole tensors."""
        return sum(len(change.places) for change in self.changes)


class ServedWeights:
    """The weights of a serving model; `gather` is for tensor parallelism (see `Gather`)."""

    def __init__(self, tensor_map: TensorMap, gather: Gather | None = None) -> None:
        self.placements = tensor_map
        self._gather = gather
        self.version: int | None = None
        self.digest: bytes | None = None
        self.digests: dict[str, bytes] = {}
        self.poisoned = ""

    @property
    def is_alone(self) -> bool:
        """Whether this is the only rank."""
        return self._gather is None

    def read(self, name: str, gather: Gather | None = None) -> Tensor:
        """Return a tensor of the checkpoint as it is served: BF16 on the CPU, contiguous.

        With tensor parallelism all ranks read the same tensors in the same order.

        Args:
            gather: of the thread that calls this, if it is another one than that of the jobs.

        Raises:
            ServedWeightsError: an element that is served in float32 is no BF16 number.
        """
        tensor, signal = self.read_together(name, Signal.GO_ON, gather)
        if signal == Signal.FAILED:
            raise ServedWeightsError(f"{name}: an element that is served on another rank is no BF16 number")
        return tensor

    def read_together(self, name: str, signal: Signal, gather: Gather | None = None) -> tuple[Tensor, Signal]:
        """Read a tensor and tell the other ranks something with it; return the tensor, and the largest signal of any
        rank, with which the tensor may be incomplete.

        Raises:
            ServedWeightsError: an element on this rank is no BF16 number; the others are told that it FAILED.
        """
        placement = self.placements[name]
        # Elements of other ranks are 0, and the all-reduce fills them in. One more element is the signal, so that it
        # needs no all-reduce of its own.
        is_whole = sum(piece.elements for piece in placement.pieces) == placement.elements
        new = torch.empty if is_whole else torch.zeros
        flat, is_exact = new(placement.elements + 1, dtype=torch.int16), True
        bits = flat[:-1].view(placement.shape)
        for piece in placement.pieces:
            narrow, is_exact_here = _narrow(piece.view)
            piece.source_view(bits).copy_(narrow)
            is_exact = is_exact and is_exact_here
        answer = self._exchange(flat, signal if is_exact else Signal.FAILED, gather or self._gather)
        if not is_exact:
            raise ServedWeightsError(f"{name}: an element that is served is no BF16 number")
        return bits.view(torch.bfloat16), answer

    def agree(self, signal: Signal) -> Signal:
        """Return the largest signal of any rank, when all of them have called this."""
        return self._exchange(torch.zeros(1, dtype=torch.int16), signal, self._gather)

    def _exchange(self, flat: Tensor, signal: Signal, gather: Gather | None) -> Signal:
        """Complete a tensor whose last element is the place of the signal."""
        flat[-1] = signal
        if gather is not None:
            gather(flat)
        return Signal(int(flat[-1]))

    def verify(self, version: int, digest: bytes) -> None:
        """Read all tensors back and compare their digests; the weights are then those of the version.

        Args:
            digest: of the version's weights.

        Raises:
            DifferentWeightsError: the weights are not those of the version. They have no version then.
        """
        digests = {name: self._read_digest(name) for name in self.placements}
        expected = self.digests or digests
        wrong = [name for name, found in digests.items() if not found or found != expected.get(name)]
        # The digest of all tensors decides; `wrong` only says where to look.
        if weights_digest(digests, self.described()) != digest:
            self.version = self.digest = None
            raise DifferentWeightsError(version, sorted(wrong))
        self.version, self.digest, self.digests = version, digest, digests

    def _read_digest(self, name: str) -> bytes:
        """Return the digest of a tensor as it is served; empty if no tensor of the checkpoint could be served so."""
        try:
            return tensor_digest(self.read(name))
        except ServedWeightsError:
            return b""

    def commit(self, staged: StagedVersion) -> None:
        """Write a staged version into the parameters. The caller has paused the engine.

        A whole checkpoint has no version until it has been verified.

        Raises:
            ServedWeightsError: it could not be written, and the old version serves.
            PoisonedError: nor could the old version be restored.
        """
        # Order: refuse what does not fit, forget the version, write, and name the new version last. A failure at any
        # point leaves weights without a version, or with the old one, never with a version that is not theirs.
        if self.poisoned:
            raise PoisonedError(self.poisoned)
        if staged.base is not None and staged.base != self.digest:
            raise ServedWeightsError(f"version {staged.version} was staged for other weights than those that serve")
        version, digest, digests = self.version, self.digest, self.digests
        self.version = self.digest = None  # until all of it is written
        swapped: list[ElementChange] = []
        try:
            for change in staged.changes:
                # Before the swap, so that one that fails half-way is undone too.
                swapped.append(change)
                change.swap()
            self._write(staged.tensors)
        except Exception as error:
            self._undo(swapped, staged, error)
            self.version, self.digest, self.digests = version, digest, digests
            raise ServedWeightsError(f"version {staged.version} was not committed, and undone: {error}") from error
        # Whole tensors were written without a digest of what is there now; `verify` reads them back.
        if staged.tensors:
            self.digests = {}
        else:
            self.version, self.digest, self.digests = staged.version, staged.digest, staged.digests

    def _write(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            bits = tensor.contiguous().view(torch.int16)
            for piece in self.placements[name].pieces:
                piece.view.copy_(widen(piece.source_view(bits).to(piece.target.device), piece.target.dtype))

    def _undo(self, swapped: list[ElementChange], staged: StagedVersion, error: Exception) -> None:
        """Bring the old elements back."""
        try:
            if staged.tensors:
                # A whole checkpoint overwrites what an undo would need, so only single elements can be taken back.
                raise PoisonedError("whole tensors cannot be undone")
            # In reverse order: where two changes touch one element, its oldest value comes back last.
            for change in reversed(swapped):
                change.undo()
        except Exception as second:
            self.poisoned = f"the weights are damaged by a commit that failed ({error}; {second}); reload them"
            raise PoisonedError(self.poisoned) from second

    def described(self) -> dict[str, Tensor]:
        """Return tensors of the checkpoint's names, dtype and shapes without data."""
        return {
            name: torch.empty(placement.shape, dtype=torch.bfloat16, device="meta")
            for name, placement in self.placements.items()
        }


def widen(bits: Tensor, kind: torch.dtype) -> Tensor:
    """Convert the bits of BF16 numbers to those of the served dtype: int16 as it is, or int32 for float32."""
    # BF16 is the upper half of float32, so widening shifts the bits and rounds nothing.
    return bits if kind == torch.int16 else bits.to(torch.int32) << 16


def _narrow(bits: Tensor) -> tuple[Tensor, bool]:
    """Convert the bits of served numbers to those of BF16 numbers, int16; return whether that lost nothing."""
    if bits.dtype == torch.int16:
        return bits, True
    # A served float32 whose lower half is not 0 was changed by something other than a version.
    return (bits >> 16).to(torch.int16), not (bits & _LOW_BITS).any()


def element_changes(placement: Placement, before: Tensor, after: Tensor) -> list[ElementChange]:
    """Return the changes from one tensor to another, BF16 on the CPU, for the parts of it that lie on this rank."""
    old, new = before.reshape(-1).view(torch.int16), after.reshape(-1).view(torch.int16)
    # Bits are compared, not numbers: 0.0 and -0.0 differ, and a NaN equals itself. By numpy, as torch takes 4 times as
    # long (`bench.engines patches`).
    indices = torch.from_numpy(np.flatnonzero(old.numpy() != new.numpy()))
    values = new[indices]
    return [_change(piece, indices, values) for piece in placement.pieces]


def _change(piece: Piece, indices: Tensor, values: Tensor) -> ElementChange:
    inside, places = piece.locate(indices)
    # Half the memory of int64, where the storage is small enough.
    kind = torch.int32 if piece.target.numel() < 1 << 31 else torch.int64
    # Copied to a GPU while staging, so that the commit waits for no transfer.
    device = piece.target.device
    return ElementChange(piece.target, places.to(kind).to(device), widen(values[inside], piece.target.dtype).to(device))
