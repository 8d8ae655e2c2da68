"""Make and read contributions, part by part (docs/spec/pseudogradient.md, sections 1 to 3)."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch

from protocol import limits
from protocol.digest import Weights
from protocol.errors import ContributionError, MalformedError
from protocol.pseudogradient.arithmetic import LANES, Floats, SquaredNorm, check_finite, pseudo_gradient
from protocol.pseudogradient.chunk_frames import decode_chunks, encode_chunks, entries_of
from protocol.pseudogradient.chunks import blocks_of
from protocol.pseudogradient.parts import Part, parts_of
from protocol.pseudogradient.payload import Coding, File, Head, Kind, Payload, read_head, write_head
from protocol.pseudogradient.sparse_decoding import decode_sparse
from protocol.pseudogradient.sparse_encoding import Inputs, SparseCoding, SparseEncoder

Keep = Callable[[bytes], File]
"""Keeps the bytes of a file of a payload, in memory or elsewhere."""


def in_memory(data: bytes) -> File:
    """Keep a file in memory."""
    return data


class ContributionEncoder:
    """The encoder of one contribution. It holds one part at a time, and the frames of one file, which `keep` stores.
    `base` is the digest of the FP32 weights that it starts from, `sender` names the site and the round: 32 bytes each.
    """

    def __init__(
        self,
        coding: Coding,
        base: bytes,
        sender: bytes,
        file_bytes: int = limits.MAX_PAYLOAD_FILE_BYTES,
        keep: Keep = in_memory,
    ) -> None:
        self._coding, self._base, self._sender = coding, base, sender
        self._norm, self._entries, self._sizes = SquaredNorm(), list[int](), list[int]()
        self._sparse = SparseEncoder(_sparse(coding)) if coding.kind in (Kind.EXACT, Kind.GRID) else None
        self._file_bytes, self._keep = file_bytes, keep
        self._file, self._files, self._digests = bytearray(), list[File](), list[bytes]()

    def add(self, part: Part, inputs: Inputs) -> Floats:
        """Encode the next part; return the error feedback after sending: float32 [n]."""
        # Exact and grid values: one kernel computes update, values, remainder and norm while a block is in the cache.
        squares, residual = np.zeros(LANES), np.empty_like(inputs.base)
        if self._sparse is not None:
            entries, frame = self._sparse.encode(inputs, residual, squares)
            self._norm.add_lanes(squares)
        else:
            entries, frame, residual = self._whole(part, inputs)
        self._entries.append(entries)
        self._sizes.append(len(frame))
        # A frame lies in one file; where it would make the file too large, the next one begins with it.
        if self._file and len(self._file) + len(frame) > self._file_bytes:
            self._end_file()
        self._file += frame
        return residual

    def _end_file(self) -> None:
        data = bytes(self._file)
        self._files.append(self._keep(data))
        self._digests.append(sha256(data).digest())
        self._file = bytearray()

    def _whole(self, part: Part, inputs: Inputs) -> tuple[int, bytes, Floats]:
        """Encode the next part of dense or chunked values; return the entries, the frame and the error feedback."""
        values = pseudo_gradient(inputs.base, inputs.local, inputs.feedback, inputs.decay)
        # `encode_chunks` subtracts what is sent, and leaves the error feedback; dense values leave none.
        if self._coding.kind == Kind.CHUNKED:
            sent = np.zeros_like(values)
            entries, frame = encode_chunks(values, part.shapes, self._coding.chosen, sent)
            self._norm.add(sent)
            return entries, frame, values
        self._norm.add(values)
        return values.size, values.astype("<f4").tobytes(), np.zeros_like(values)

    def finish(self) -> tuple[Head, Payload]:
        """Return the head and the files, after the last part."""
        self._end_file()
        entries, sizes = tuple(self._entries), tuple(self._sizes)
        limit, digests = self._file_bytes, tuple(self._digests[1:])
        head = Head(self._coding, self._base, self._sender, self._norm.value, entries, sizes, limit, digests)
        # The head names the other files and the norm, so the first file comes last.
        return head, (self._keep(write_head(head) + self._files[0][:]), *self._files[1:])


def _sparse(coding: Coding) -> SparseCoding:
    return SparseCoding(coding.kind == Kind.EXACT, coding.fraction)


def decode_part(
    frame: memoryview,
    coding: Coding,
    part: Part,
    base: Floats,
    entries: int,
    norm: SquaredNorm | None = None,
    out: Floats | None = None,
) -> Floats:
    """Decode one part, hostile bytes; return its values, zeros where nothing was sent, in `out` or new memory: float32
    [n]. A ProtocolError says where the frame breaks docs/spec/pseudogradient.md.

    `base` is the part of the shared weights: float32 [n]; `entries` the number that the head states. The part is added
    to `norm`.
    """
    norm = norm or SquaredNorm()
    values: Floats = np.empty(part.elements, np.float32) if out is None else out[: part.elements]
    match coding.kind:
        case Kind.DENSE:
            if len(frame) != 4 * part.elements:
                raise MalformedError(f"a dense frame of {len(frame)} bytes", part.names[0])
            values[:] = np.frombuffer(frame, "<f4")
        case Kind.CHUNKED:
            # Of chunked values the number follows from the shapes, so the head can only be right or wrong.
            expected = sum(entries_of(blocks_of(shape), coding.chosen) for shape in part.shapes if math.prod(shape))
            if entries != expected:
                raise ContributionError(f"{entries} entries instead of {expected}", part.names[0])
            decode_chunks(frame, part.shapes, coding.chosen, values)
        case _:
            # The decoder has refused what is not finite, and added up the squares on its way.
            squares = np.zeros(LANES)
            decode_sparse(frame, base, _sparse(coding), entries, squares, values)
            norm.add_lanes(squares)
            return values
    check_finite(values, part.names[0])
    norm.add(values)
    return values


@dataclass(frozen=True, slots=True)
class Contribution:
    """An encoded contribution; `residual` is the error feedback once the manifest counts it, by name."""

    payload: Payload
    residual: dict[str, torch.Tensor]
    head: Head


def encode(
    base: Weights,
    local: Weights,
    feedback: Weights | None,
    coding: Coding,
    digest: bytes,
    *,
    decay: float = 1.0,
    sender: bytes = bytes(32),
    file_bytes: int = limits.MAX_PAYLOAD_FILE_BYTES,
    keep: Keep = in_memory,
) -> Contribution:
    """Encode a contribution of weights that fit in memory. Large ones go part by part: `ContributionEncoder`.

    Args:
        base: the shared FP32 weights with which the round began.
        local: the site's FP32 weights after its local steps.
        feedback: the site's error feedback; None for zeros, and while it is frozen.
        digest: of `base` (`protocol.digest.digest_weights`).
        decay: factor of the feedback: 1 for PULSELoCo, 0.95 for SparseLoCo.
        sender: 32 bytes that name the site and the round, which a coordinator checks; zeros where nobody does.
        file_bytes: most bytes of the frames in a file of the payload, unless it has a single one.
        keep: stores each file.
    """
    encoder, residual = ContributionEncoder(coding, digest, sender, file_bytes, keep), dict[str, torch.Tensor]()
    for part in parts_of({name: tensor.shape for name, tensor in base.items()}):
        shared = part.gather(base)
        before = np.zeros_like(shared) if feedback is None else part.gather(feedback)
        residual |= part.scatter(encoder.add(part, Inputs(shared, part.gather(local), before, decay)))
    head, payload = encoder.finish()
    return Contribution(payload, residual, head)


class ContributionDecoder:
    """The decoder of a payload, hostile bytes, part by part, of which it holds one frame at a time. `base` are the
    receiver's FP32 weights, with their digest; `max_norm` the largest L2 norm of the values that the receiver accepts.
    A ProtocolError says that the payload breaks docs/spec/pseudogradient.md or starts from other weights. Who fetches a
    file compares its digest with the head's.
    """

    def __init__(self, payload: Payload, base: Weights, digest: bytes, *, max_norm: float = math.inf) -> None:
        # Head, sizes and base first: then the place of each frame is known, and none reaches beyond its file.
        self.parts = parts_of({name: tensor.shape for name, tensor in base.items()})
        self.head = head = read_head(payload[0], self.parts, max_norm=max_norm)
        if head.base != digest:
            raise ContributionError("it starts from other weights", "contribution")
        if len(payload) != len(head.file_sizes):
            raise MalformedError(f"{len(payload)} files instead of {len(head.file_sizes)}", "contribution")
        for number, (file, size) in enumerate(zip(payload, head.file_sizes, strict=True)):
            if len(file) != size:
                raise MalformedError(f"{len(file)} bytes instead of {size}", f"file {number} of the contribution")
        self._base, self._payload, self._frames = base, payload, head.frames
        self._norm, self._checked = SquaredNorm(), 0

    def values(self, place: int, out: Floats | None = None) -> Floats:
        """Return the values of a part: float32 [n], in `out` if given. In order, even if some are read twice, the last
        one checks the norm.
        """
        (number, begin, end), part = self._frames[place], self.parts[place]
        frame, base = memoryview(self._payload[number][begin:end]), part.gather(self._base)
        is_next = place == self._checked
        norm = self._norm if is_next else None
        values = decode_part(frame, self.head.coding, part, base, self.head.entries[place], norm, out)
        # The norm that was compared with the limit is the head's: so at the end the values must have it, bit for bit.
        self._checked += is_next
        if is_next and self._checked == len(self.parts) and self._norm.value != self.head.squared_norm:
            raise ContributionError("values of another norm than the head states", "contribution")
        return values


def decode(
    payload: Payload, base: Mapping[str, torch.Tensor], digest: bytes, *, max_norm: float = math.inf
) -> Iterator[tuple[Part, Floats]]:
    """Yield the parts of a contribution with their values; arguments and errors are those of `ContributionDecoder`. No
    value may be used before the last part was yielded: only then has the norm been checked.
    """
    decoder = ContributionDecoder(payload, base, digest, max_norm=max_norm)
    for place, part in enumerate(decoder.parts):
        yield part, decoder.values(place)
