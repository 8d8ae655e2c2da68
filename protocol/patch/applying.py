"""Apply a patch to weights, at once or while it arrives (docs/spec/patch.md, section 5); check one's own patch.

Order of checks: the table against the limits, the digest of the base (names, dtypes, shapes, elements) if those of its
tensors are given, the table against the given tensors, each frame as it is decoded, the digest of each changed tensor,
the digest of the result. That covers every tensor, changed or not, so a wrong base cannot pass.

A follower hashes the decoded tensors, because it has only digests of the new weights. The trainer has the new weights
and their digests, so its own check compares the decoded elements with them and hashes nothing: equal bytes have the
digests that the manifest will contain.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from protocol.digest import Weights, weights_digest
from protocol.errors import PatchError
from protocol.patch.codec import Digests, EncodedTensor, digest_bits
from protocol.patch.container import (
    CHECK_BYTES,
    PREAMBLE,
    Header,
    Mode,
    TensorRow,
    Unit,
    check_length,
    header_bytes,
    read_header,
    split_frames,
    unit_row,
    units_of,
)
from protocol.patch.fields import BoundedBuffer
from protocol.patch.frames import decode_frame
from protocol.patch.values import Bits, bits_of, copy_bits, empty_like

NewTensors = Callable[[Weights], dict[str, torch.Tensor]]
"""Returns tensors of the names, dtypes and shapes of others, contiguous and aligned on the CPU, with any elements."""


Changes = tuple[NDArray[np.int64], Bits]
"""The flat indices of changed elements, distinct and in any order, and their new values."""

_WAITING_FRAMES: Final = 4  # a thread, of a patch that arrives faster than it is decoded


@dataclass(frozen=True, slots=True)
class AppliedPatch:
    """The new weights, with the BLAKE3 of each of their tensors."""

    weights: dict[str, torch.Tensor]
    digests: dict[str, bytes]


def check_tensor(row: TensorRow, digest: bytes) -> None:
    """Raise PatchError unless a new tensor has the BLAKE3 that its row promises: the base is wrong."""
    if digest[:CHECK_BYTES] != row.check:
        raise PatchError("the patch does not lead to the tensor that it promises: a wrong base", row.name)


def apply_frame(
    old: torch.Tensor,
    row: TensorRow,
    frame: memoryview,
    new: torch.Tensor | None = None,
    changes: list[Changes] | None = None,
) -> tuple[torch.Tensor, bytes]:
    """Decode a changed tensor into `new`, which may be `old` itself, or else into new memory; return it and its BLAKE3.
    The changed elements of each piece are added to `changes`.
    """
    # Each piece is hashed while it is in the processor's cache: a second pass over the tensor would take as long again.
    # The values of changes are taken from the bytes that were hashed.
    new = empty_like(old) if new is None else new
    hasher = blake3()
    pieces = decode_frame(row, frame, bits_of(old), bits_of(new), places=changes is not None)
    for begin, piece, places in pieces:
        hasher.update(piece.data.cast("B"))
        if changes is not None:
            changes.append((places + begin, piece[places]))
    digest = hasher.digest()
    check_tensor(row, digest)
    return new, digest


def apply_unit(
    old: Weights,
    rows: Sequence[TensorRow],
    frame: memoryview,
    places: Weights | None = None,
    changes: dict[str, list[Changes]] | None = None,
) -> dict[str, tuple[torch.Tensor, bytes]]:
    """Decode the changed tensors of a frame, whose row is the last one; return each new tensor with its BLAKE3, by
    name. They are written to `places`, which may be `old` itself, or else to new memory. `changes` gets the changed
    elements of each.
    """
    if changes is not None:
        changes |= {row.name: [] for row in rows}
    if len(rows) == 1:
        name = rows[0].name
        new = empty_like(old[name]) if places is None else places[name]
        return {name: apply_frame(old[name], rows[0], frame, new, None if changes is None else changes[name])}
    # Joined tensors are small, so they are copied: side by side they are the tensor that was encoded.
    # Old and new ones in two arrays: in a single one, kernels would take twice as long.
    before = np.concatenate([bits_of(old[row.name]) for row in rows])
    after = np.empty_like(before)
    for _ in decode_frame(unit_row(rows), frame, before, after, places=False):
        pass
    data, begin, result = after.view(np.uint8), 0, dict[str, tuple[torch.Tensor, bytes]]()
    for row in rows:
        own = data[begin : begin + row.nbytes]
        part, digest = torch.from_numpy(own).view(row.dtype), blake3(own.data).digest()
        begin += row.nbytes
        if changes is not None:
            elements = bits_of(part)
            indices = np.flatnonzero(bits_of(old[row.name]) != elements)
            changes[row.name].append((indices, elements[indices]))
        tensor = part.view(row.shape)
        result[row.name] = tensor.clone() if places is None else copy_bits(tensor, places[row.name]), digest
    check_tensor(rows[-1], result[rows[-1].name][1])
    return result


def apply_with_digests(
    weights: Weights, patch: bytes, *, digests: Digests | None = None, threads: int = 1
) -> AppliedPatch:
    """Apply a patch (hostile bytes) as `apply` does, and return the digests of the new tensors as well, of unchanged
    ones from the verified `digests`; None to compute them again. `threads` tensors are decoded at the same time.
    """
    # Before the first frame is decoded: so the table accounts for every byte of the patch.
    header = read_header(patch)
    check_length(patch, header)
    application = StreamingApply(weights, digests=digests, threads=threads)
    application.start(header)
    application.feed(memoryview(patch)[header.frames_begin :])
    return application.finish()


def apply(weights: Weights, patch: bytes) -> dict[str, torch.Tensor]:
    """Return the weights that a patch gives. Unchanged tensors are shared with `weights`; changed ones are new."""
    return apply_with_digests(weights, patch).weights


class StreamingApply:
    """The application of a patch while it arrives. With one thread, only one frame is in memory at a time. More threads
    go on decoding while the next bytes arrive, of up to `_WAITING_FRAMES` frames a thread.

    `new_tensors` is called once, and says where all new weights lie: in the tensors of `weights`, or in others alone.
    Without it they lie in memory of the process, where unchanged tensors are shared with `weights`.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        digests: Digests | None = None,
        threads: int = 1,
        new_tensors: NewTensors | None = None,
    ) -> None:
        self._weights = weights
        self._base_digests = digests
        self._threads = threads
        self._new_tensors = new_tensors
        self._places: dict[str, torch.Tensor] = {}
        self._head = bytearray()
        self._header: Header | None = None
        self._units: list[Unit] = []
        self._next = 0
        self._frame: BoundedBuffer | None = None
        self._result = AppliedPatch({}, {})
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self._pending: deque[Future[None]] = deque()

    def feed(self, data: bytes | memoryview) -> list[str]:
        """Process the next bytes of the patch (hostile), and return the names of the tensors whose frames they end.
        With threads, a frame may be refused by a later call, or by `finish`.
        """
        rest = memoryview(data)
        # The preamble says how many bytes the table has. Until both are complete, bytes are only collected.
        while self._header is None:
            has_preamble = len(self._head) >= PREAMBLE.size
            missing = (header_bytes(self._head) if has_preamble else PREAMBLE.size) - len(self._head)
            if has_preamble and not missing:
                self.start(read_header(self._head))
            elif not rest:
                return []
            self._head += rest[:missing]
            rest = rest[missing:]
        names = []
        for unit, frame in self._take(rest):
            names += [row.name for row in unit]
            if self._pool is None:
                self._apply(unit, frame)
                continue
            self._pending.append(self._pool.submit(self._apply, unit, frame))
            while len(self._pending) > _WAITING_FRAMES * self._threads:
                self._pending.popleft().result()
        return names

    def finish(self) -> AppliedPatch:
        """Return the new weights after the last byte; PatchError if the patch is cut off or its promise not kept."""
        while self._pending:
            self._pending.popleft().result()
        result = self._result
        if self._header is None or len(result.weights) < len(self._weights):
            raise PatchError("cut off", "patch")
        # Last, the digest of everything. A row has 8 bytes of its tensor's digest, which tell which tensor is at fault.
        if weights_digest(result.digests, result.weights) != self._header.result:
            raise PatchError("the patch does not lead to the weights that it promises: a wrong base")
        return AppliedPatch(
            {name: result.weights[name] for name in self._weights},
            {name: result.digests[name] for name in self._weights},
        )

    def start(self, header: Header) -> None:
        """Begin with a header that was read apart, and check what it alone can show before any frame is decoded."""
        self._header = header
        self._head.clear()
        if self._base_digests is not None and weights_digest(self._base_digests, self._weights) != header.base:
            raise PatchError("made for other weights than these")
        self._units = header.table.units(self._weights)
        if self._new_tensors is not None:
            self._places = self._new_tensors(self._weights)

    def _take(self, rest: memoryview) -> Iterator[tuple[Unit, memoryview]]:
        """Yield the frames that more bytes complete, with the rows of their tensors."""
        while self._next < len(self._units):
            # A frame may come in many pieces, and one piece may have the ends of many frames.
            unit = self._units[self._next]
            missing = unit[-1].size - (self._frame.size if self._frame else 0)
            piece, rest = rest[:missing], rest[missing:]
            frame = piece  # not copied where it came whole
            if self._frame or len(piece) < missing:
                self._frame = self._frame or BoundedBuffer(unit[-1].size)
                self._frame.put(piece)
                if len(piece) < missing:
                    return
                frame, self._frame = self._frame.frame(), None
            # Counted before it is decoded: if it is refused, `finish` finds a tensor missing.
            self._next += 1
            yield unit, frame
        if len(rest):
            raise PatchError(f"{len(rest)} bytes behind the end", "patch")

    def _apply(self, rows: Unit, frame: memoryview) -> None:
        name = rows[-1].name
        old, place = self._weights[name], self._places.get(name)
        if rows[-1].mode == Mode.UNCHANGED:
            new = old if place is None else copy_bits(old, place)
            digest = self._base_digests[name] if self._base_digests is not None else digest_bits(bits_of(old))
            results = {name: (new, digest)}
        else:
            results = apply_unit(self._weights, rows, frame, self._places or None)
        for name, (new, digest) in results.items():
            self._result.weights[name], self._result.digests[name] = new, digest


def _check_elements(rows: Sequence[TensorRow], frame: memoryview, old: Weights, new: Weights) -> None:
    """Check that the decoded elements of a frame are those of its new tensors, complete and in order."""
    # The pieces must join without a gap, so that no element is left unseen.
    before, new_elements = (_side_by_side([bits_of(weights[row.name]) for row in rows]) for weights in (old, new))
    row, end = unit_row(rows), 0
    for begin, piece, _ in decode_frame(row, frame, before, places=False):
        if begin != end or not np.array_equal(piece, new_elements[begin : begin + piece.size]):
            raise PatchError("does not decode to the tensor that it was made from", row.name)
        end = begin + piece.size
    if end != new_elements.size:
        raise PatchError(f"decodes to {end} of {new_elements.size} elements", row.name)


def _side_by_side(tensors: list[Bits]) -> Bits:
    return tensors[0] if len(tensors) == 1 else np.concatenate(tensors)


def check_frames(old: Weights, new: Weights, encoded: Mapping[str, EncodedTensor]) -> None:
    """Check that a follower that decodes the frames of some tensors, of the same names, gets the new ones: a
    MalformedError, LimitError or PatchError says that it would refuse one, or get another tensor.
    """
    units = units_of(encoded[name].row for name in sorted(new))
    if sum(map(len, units)) < len(new):
        raise PatchError("joined to a tensor that was not encoded with it", "patch")
    for rows in units:
        item, row = encoded[rows[-1].name], rows[-1]
        if row.mode == Mode.UNCHANGED:
            if item.after != item.before:
                raise PatchError("unchanged in the patch, but the new tensor has another digest", row.name)
            continue
        check_tensor(row, item.after)
        _check_elements(rows, item.frame, old, new)


def check_container(patch: bytes, encoded: Mapping[str, EncodedTensor], base: bytes, result: bytes) -> None:
    """Check that a patch consists of frames that `check_frames` has checked, of all tensors by name, and leads from one
    digest to the other: MalformedError, LimitError or PatchError if a follower would refuse it.
    """
    # The frames were checked before they were joined, so it suffices that these are their bytes, under the same rows.
    header = read_header(patch)
    if (header.base, header.result) != (base, result):
        raise PatchError("made for other weights than these")
    units = header.table.units({name: item.row for name, item in encoded.items()})
    for unit, frame in split_frames(patch, header, units):
        items = [encoded[row.name] for row in unit]
        if unit != tuple(item.row for item in items) or bytes(frame) != bytes(items[-1].frame):
            raise PatchError("a frame that is not the one that was encoded", unit[-1].name)
