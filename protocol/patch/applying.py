"""A patch to weights: into new tensors, in place, as it arrives, or only some rows (docs/spec/patch.md, section 5).

Order of checks: the table against the caps, the table against the tensors at hand (names, dtypes, shapes), the digest of the
base where it is known, each frame as it is decoded, the digest of each changed tensor, the digest of the whole. The digest of
the result covers every element, changed or not, so a wrong base cannot pass.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from blake3 import blake3

from protocol.digest import Weights, weights_digest
from protocol.errors import PatchError
from protocol.patch.codec import Digests, digest_tensor
from protocol.patch.container import CHECK_BYTES, Header, Mode, Row, header_bytes, read_header, split_frames
from protocol.patch.frames import decode_frame
from protocol.patch.sparse import chunks_of
from protocol.patch.values import Bits, bits_of


@dataclass(frozen=True, slots=True)
class Applied:
    """The new weights, and the digests of their tensors that were computed on the way."""

    weights: dict[str, torch.Tensor]
    digests: dict[str, bytes]


def check_fit(weights: Weights, header: Header) -> None:
    """The table's tensors must be those of the weights.

    Raises:
        PatchError: a tensor too many or too few, or another dtype or shape.
    """
    if len(weights) != len(header.rows):
        raise PatchError(f"a patch of {len(header.rows)} tensors for weights of {len(weights)}")
    for row in header.rows:
        tensor = weights.get(row.name)
        if tensor is None:
            raise PatchError("a tensor that the weights do not have", row.name)
        if tensor.dtype != row.dtype or tuple(tensor.shape) != row.shape:
            have = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise PatchError(f"{row.dtype} {row.shape} where the weights have {have}", row.name)


def _check_tensor(row: Row, digest: bytes) -> None:
    if digest[:CHECK_BYTES] != row.check:
        raise PatchError("the patch does not lead to the tensor that it promises: a wrong base", row.name)


def _check_weights(weights: Weights, digests: Digests, header: Header) -> None:
    if weights_digest(digests, weights) != header.result:
        raise PatchError("the patch does not lead to the weights that it promises: a wrong base")


def apply_frame(old: torch.Tensor, row: Row, frame: memoryview) -> tuple[torch.Tensor, bytes]:
    """The new tensor of a changed row and its digest, each element read once.

    Raises:
        PatchError, MalformedError, LimitError: a frame that does not fit the tensor.
    """
    new = torch.empty_like(old, requires_grad=False)
    hasher = blake3()
    for _, piece in decode_frame(row, frame, bits_of(old), bits_of(new)):
        hasher.update(memoryview(piece.view("u1")))
    digest = hasher.digest()
    _check_tensor(row, digest)
    return new, digest


def _check_in_scratch(old: torch.Tensor, row: Row, frame: memoryview) -> bytes:
    hasher = blake3()
    for _, piece in decode_frame(row, frame, bits_of(old)):
        hasher.update(memoryview(piece.view("u1")))
    digest = hasher.digest()
    _check_tensor(row, digest)
    return digest


def _for_each[T](work: Callable[[tuple[Row, memoryview]], T], items: Iterable[tuple[Row, memoryview]], threads: int) -> list[T]:
    if threads == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def apply_with_digests(
    weights: Weights, patch: bytes, *, digests: Digests | None = None, threads: int = 1
) -> Applied:
    """Like `apply`; takes the tensors' digests where they are known, gives the new ones back.

    Args:
        digests: BLAKE3 of each tensor of `weights`, as it was last verified; without it, unchanged tensors are read too.
        threads: tensors at the same time.
    """
    header = read_header(patch)
    check_fit(weights, header)
    if digests is not None and weights_digest(digests, weights) != header.base:
        raise PatchError("made for other weights than these")

    def one(item: tuple[Row, memoryview]) -> tuple[torch.Tensor, bytes]:
        row, frame = item
        old = weights[row.name]
        if row.mode == Mode.UNCHANGED:
            return old, digests[row.name] if digests is not None else digest_tensor(old)
        return apply_frame(old, row, frame)

    items = zip(header.rows, split_frames(patch, header), strict=True)
    pairs = dict(zip((row.name for row in header.rows), _for_each(one, items, threads), strict=True))
    result = Applied({name: pairs[name][0] for name in weights}, {name: pairs[name][1] for name in weights})
    _check_weights(result.weights, result.digests, header)
    return result


def apply(weights: Weights, patch: bytes) -> dict[str, torch.Tensor]:
    """The weights that the patch leads to. Unchanged tensors are shared with `weights`, changed ones are new.

    Raises:
        MalformedError, LimitError: bytes that are not a patch, or larger than any may be.
        PatchError: a patch for other weights, or one that contradicts itself.
    """
    return apply_with_digests(weights, patch).weights


def apply_in_place_with_digests(
    weights: dict[str, torch.Tensor], patch: bytes, *, digests: Digests | None = None, threads: int = 1
) -> dict[str, bytes]:
    """Like `apply_in_place`; takes and gives digests like `apply_with_digests`."""
    header = read_header(patch)
    check_fit(weights, header)
    if digests is not None and weights_digest(digests, weights) != header.base:
        raise PatchError("made for other weights than these")
    addresses = [weights[row.name].data_ptr() for row in header.rows if row.mode != Mode.UNCHANGED]
    if len(set(addresses)) != len(addresses):
        raise ValueError("changed tensors share memory")

    def check(item: tuple[Row, memoryview]) -> bytes:
        row, frame = item
        if row.mode == Mode.UNCHANGED:
            return digests[row.name] if digests is not None else digest_tensor(weights[row.name])
        return _check_in_scratch(weights[row.name], row, frame)

    def write(item: tuple[Row, memoryview]) -> None:
        row, frame = item
        if row.mode != Mode.UNCHANGED:
            flat = weights[row.name].detach().view(-1)
            for begin, piece in decode_frame(row, frame, bits_of(flat)):
                flat[begin : begin + piece.size] = torch.from_numpy(piece.view("u1")).view(flat.dtype)

    items = list(zip(header.rows, split_frames(patch, header), strict=True))
    after = dict(zip((row.name for row in header.rows), _for_each(check, items, threads), strict=True))
    _check_weights(weights, after, header)
    _for_each(write, items, threads)
    return after


def apply_in_place(weights: dict[str, torch.Tensor], patch: bytes) -> None:
    """Write the patch into the weights: a first pass checks everything, a second one writes.

    Raises:
        As `apply`; the weights are then as they were.
        ValueError: two changed tensors share memory.
    """
    apply_in_place_with_digests(weights, patch)


def apply_rows(rows: torch.Tensor, patch: bytes, name: str, first_row: int) -> torch.Tensor:
    """The new rows of one tensor for a node that holds only these, as in tensor parallelism.

    Args:
        rows: rows first_row, first_row + 1, ... of the tensor: [R, ...].
        first_row: must, like the end of `rows`, be a multiple of an eighth of the tensor's rows, or of what `chunks_of` allows.

    Returns:
        The new rows, [R, ...]. No digest covers a part of a tensor: the manifest's digest of the patch has to.

    Raises:
        PatchError, MalformedError, LimitError: a patch that does not fit.
        ValueError: rows that do not begin or end between chunks.
    """
    header = read_header(patch)
    found = [(r, f) for r, f in zip(header.rows, split_frames(patch, header), strict=True) if r.name == name]
    if not found:
        raise PatchError("a tensor that the patch does not have", name)
    row, frame = found[0]
    if row.dtype != rows.dtype or row.shape[1:] != tuple(rows.shape[1:]):
        raise PatchError(f"{row.dtype} {row.shape} does not have rows of {tuple(rows.shape[1:])}", name)
    if row.mode == Mode.UNCHANGED:
        return rows
    width = row.elements // max(1, row.shape[0])
    begin, end = first_row * width, first_row * width + rows.numel()
    edges = {0, *(edge for chunk in chunks_of(row.shape) for edge in chunk)}
    if begin not in edges or end not in edges:
        raise ValueError(f"rows {first_row} to {first_row + len(rows)} of {name} do not begin and end between chunks")
    return _decode_rows(rows, row, frame, begin)


def _decode_rows(rows: torch.Tensor, row: Row, frame: memoryview, begin: int) -> torch.Tensor:
    from protocol.patch.partial import decode_range  # noqa: PLC0415

    return decode_range(rows, row, frame, begin)


class StreamingApply:
    """Applies a patch while it arrives: bytes in, finished tensors out. Holds one frame at a time."""

    def __init__(self, weights: Weights, *, digests: Digests | None = None) -> None:
        self._weights = weights
        self._known = digests
        self._buffer = bytearray()
        self._header: Header | None = None
        self._next = 0
        self._result = Applied({}, {})

    def feed(self, data: bytes) -> list[str]:
        """Take the next bytes; returns the names of the tensors they completed.

        Raises:
            As `apply`, as soon as the bytes at hand show it.
        """
        self._buffer += data
        if self._header is None and not self._read_table():
            return []
        header = self._header
        assert header is not None
        finished = []
        while self._next < len(header.rows) and len(self._buffer) >= header.rows[self._next].size:
            finished.append(self._take(header.rows[self._next]))
            self._next += 1
        if self._next == len(header.rows) and self._buffer:
            raise PatchError(f"{len(self._buffer)} bytes behind the end", "patch")
        return finished

    def finish(self) -> Applied:
        """The new weights, once every byte was fed.

        Raises:
            PatchError: the patch is cut off, or does not lead to the weights that it promises.
        """
        if self._header is None or self._next < len(self._header.rows):
            raise PatchError("cut off", "patch")
        _check_weights(self._result.weights, self._result.digests, self._header)
        return self._result

    def _read_table(self) -> bool:
        from protocol.patch.container import PREAMBLE  # noqa: PLC0415

        if len(self._buffer) < PREAMBLE.size or len(self._buffer) < header_bytes(self._buffer):
            return False
        self._header = read_header(bytes(self._buffer))
        check_fit(self._weights, self._header)
        if self._known is not None and weights_digest(self._known, self._weights) != self._header.base:
            raise PatchError("made for other weights than these")
        del self._buffer[: self._header.frames_begin]
        return True

    def _take(self, row: Row) -> str:
        frame = memoryview(bytes(self._buffer[: row.size]))
        del self._buffer[: row.size]
        old = self._weights[row.name]
        if row.mode == Mode.UNCHANGED:
            digest = self._known[row.name] if self._known is not None else digest_tensor(old)
            self._result.weights[row.name], self._result.digests[row.name] = old, digest
        else:
            self._result.weights[row.name], self._result.digests[row.name] = apply_frame(old, row, frame)
        return row.name


__all__ = ["Bits"]
