"""The weights in the memory of the serving model: read back as the checkpoint's tensors, changed in place, rolled back.

States: unverified (after loading, or after a whole checkpoint was written), verified (the digests of all tensors are
those of a version), poisoned (a change failed half-way and could not be undone). Only verified weights have a version.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grailnode.engine.vllm.inside.element_changes import ElementChange, copies_beside, widen
from grailnode.engine.vllm.inside.tensor_map import TensorMap
from protocol.digest import tensor_digest, weights_digest
from protocol.patch.codec import for_each


class ServedWeightsError(Exception):
    """The weights cannot be read, staged or changed; the message says what is wrong."""


class PoisonedError(ServedWeightsError):
    """The weights are damaged, and must be loaded again."""


class DifferentWeightsError(ServedWeightsError):
    """The weights read back are not those of a version."""

    def __init__(self, version: int, tensors: Sequence[str]) -> None:
        which = f" in {len(tensors)} tensors: {', '.join(tensors)}" if tensors else ""
        super().__init__(f"the weights read back from the engine differ from version {version}{which}")
        self.tensors = tuple(tensors)


OTHER_RANK_FAILED: Final = "another rank of this server failed, and its error says why"

Buffer = NDArray[np.int16]

Gather = Callable[[Tensor], None]
"""Completes a tensor, int16 on the CPU, in place with the parts of all ranks; elements of other ranks are 0. Bytes that
several ranks have become the largest of them.
"""


class Signal(IntEnum):
    """What a rank tells the others whenever they agree; all of them act on the largest."""

    GO_ON = 0
    CANCELLED = 1
    FAILED = 2


@dataclass
class StagedVersion:
    """A version that was checked and can be committed."""

    version: int
    base: bytes | None  # digest of the weights that the changes are for; None for a checkpoint, which fits any
    digest: bytes  # of all its weights
    digests: dict[str, bytes]  # BLAKE3 of each tensor
    changes: list[ElementChange] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)  # BF16, to be written whole


class ServedWeights:
    """The weights of a serving model; `gather` is for tensor parallelism. Those of adapters are verified together with
    their base, which never changes.
    """

    def __init__(
        self, tensor_map: TensorMap, gather: Gather | None = None, base: "ServedWeights | None" = None
    ) -> None:
        self.placements = tensor_map
        self._gather = gather
        self.base = base
        self.version: int | None = None
        self.digest: bytes | None = None
        self.digests: dict[str, bytes] = {}
        self.poisoned = ""

    @property
    def is_alone(self) -> bool:
        return self._gather is None

    def buffer(self) -> Buffer:
        """Return memory into which any tensor can be read; what is never written takes none."""
        return np.empty(max(placement.elements for placement in self.placements.values()), np.int16)

    def read(self, name: str, buffer: Buffer | None = None) -> Tensor:
        """Return a tensor of the checkpoint as it is served: BF16 on the CPU, contiguous; in a buffer, or in new
        memory, which takes twice the time. ServedWeightsError if an element on this rank is no BF16 number; the other
        ranks read NaNs.

        With tensor parallelism all ranks read the same tensors in the same order.
        """
        placement = self.placements[name]
        buffer = np.empty(placement.elements, np.int16) if buffer is None else buffer[: placement.elements]
        bits, is_exact = torch.from_numpy(buffer).view(placement.shape), True
        # Elements of other ranks are 0, and the all-reduce fills them in.
        if sum(piece.elements for piece in placement.pieces) != placement.elements:
            bits.zero_()
        for piece in placement.pieces:
            upper = piece.view
            with copies_beside(upper.device):
                if upper.dtype != torch.int16:
                    # BF16 is the upper half of float32. No version changes the lower half, which is 0.
                    lower, upper = piece.halves
                    is_exact = is_exact and not lower.count_nonzero()
                piece.source_view(bits).copy_(upper)
        if not is_exact:
            bits.fill_(-1)  # the largest bytes, so that no rank finds the signed weights
        if self._gather is not None:
            self._gather(bits)
        if not is_exact:
            raise ServedWeightsError(f"{name}: an element that is served is no BF16 number")
        return bits.view(torch.bfloat16)

    def agree(self, signal: Signal) -> Signal:
        """Return the largest signal of any rank, when all of them have called this."""
        largest = torch.tensor([signal], dtype=torch.int16)
        if self._gather is not None:
            self._gather(largest)
        return Signal(int(largest))

    def verify(self, version: int, digest: bytes) -> None:
        """Read all tensors back, and compare them with the digest of a version's weights, which they are then.

        Raises DifferentWeightsError if they are not; they have no version then.
        """
        if self.base is not None:
            try:
                self.base.verify(version, self.base.digest or b"")
            except DifferentWeightsError:
                self.version = self.digest = None
                raise
        # One tensor at a time in the same memory: a second copy of the weights would not fit beside the serving.
        buffer, digests = self.buffer(), dict[str, bytes]()
        for name in self.placements:
            digests[name] = b""  # that of no tensor
            with suppress(ServedWeightsError):
                digests[name] = tensor_digest(self.read(name, buffer))
        # The digest of all tensors decides; `wrong` only says where to look.
        if weights_digest(digests, self.described()) != digest:
            wrong = [name for name, found in digests.items() if not found or found != self.digests.get(name, found)]
            self.version = self.digest = None
            raise DifferentWeightsError(version, sorted(wrong))
        self.version, self.digest, self.digests = version, digest, digests

    def commit(self, staged: StagedVersion | None, threads: int = 1) -> None:
        """Write a staged version, None if it is not staged on this rank, into the parameters, on all ranks or on none;
        on a CPU so many at the same time. The caller has paused the engine, and verifies a whole checkpoint.
        ServedWeightsError if a rank could not write it, and the old version serves; PoisonedError if not even that.
        """
        # The new version is named last: a failure at any point leaves weights with the old version, or with none.
        before, failure = (self.version, self.digest, self.digests), self._refusal(staged)
        written = None if failure else staged
        if written is not None:
            self.version = self.digest = None  # until all of it is written
            try:
                self._write(written, threads)
            except Exception as error:  # noqa: BLE001 - the other ranks have to know of it first, whatever it is
                failure = ServedWeightsError(f"version {written.version} was not committed, and undone: {error}")
                failure.__cause__ = error
        if self.agree(Signal.FAILED if failure else Signal.GO_ON) == Signal.FAILED:
            failure = failure or ServedWeightsError(OTHER_RANK_FAILED)
            if written is not None:
                self._undo(written, failure)
            self.version, self.digest, self.digests = before
            raise failure
        assert written is not None
        if written.tensors:
            self.digests = {}
        else:
            self.version, self.digest, self.digests = written.version, written.digest, written.digests

    def _refusal(self, staged: StagedVersion | None) -> ServedWeightsError | None:
        """Return why a version may not be written here; None if it may."""
        if self.poisoned:
            return PoisonedError(self.poisoned)
        if staged is None:
            return ServedWeightsError("the version is not staged")
        if staged.base is not None and staged.base != self.digest:
            return ServedWeightsError(f"version {staged.version} was staged for other weights than those that serve")
        return None

    def _write(self, staged: StagedVersion, threads: int) -> None:
        # Tensors of the checkpoint may share a parameter, so one thread writes all changes of a parameter.
        by_target: dict[int, list[ElementChange]] = {}
        for change in staged.changes:
            by_target.setdefault(change.target.data_ptr(), []).append(change)

        def swap(changes: list[ElementChange]) -> None:
            for change in changes:
                change.swap()

        for_each(swap, by_target.values(), 1 if torch.cuda.is_available() else threads)
        for name, tensor in staged.tensors.items():
            bits = tensor.contiguous().view(torch.int16)
            for piece in self.placements[name].pieces:
                piece.view.copy_(widen(piece.source_view(bits).to(piece.target.device), piece.target.dtype))
        _wait_for_the_device()

    def _undo(self, staged: StagedVersion, failure: Exception) -> None:
        """Bring the old elements back."""
        try:
            if staged.tensors:
                raise PoisonedError("whole tensors cannot be undone")
            # In reverse order: where two changes touch one element, its oldest value comes back last.
            for change in reversed(staged.changes):
                change.undo()
            _wait_for_the_device()
        except Exception as second:
            self.poisoned = f"the weights are damaged by a commit that failed ({failure}; {second}); reload them"
            raise PoisonedError(self.poisoned) from second

    def described(self) -> dict[str, Tensor]:
        """Return tensors of the checkpoint's names, dtype and shapes without data."""
        return {
            name: torch.empty(placement.shape, dtype=torch.bfloat16, device="meta")
            for name, placement in self.placements.items()
        }


def _wait_for_the_device() -> None:
    """Return when all of it is written, so that a failure is seen here, and later reads in other streams see it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
