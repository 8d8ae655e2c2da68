"""Encode a patch, and read its summary (docs/spec/patch.md)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import local
from typing import Final, NamedTuple, TypeVar

import numpy as np
import torch
from blake3 import blake3

from protocol.digest import Weights, type_name, weights_digest
from protocol.patch.container import (
    CHECK_BYTES,
    MAX_JOINED_ELEMENTS,
    PROFILES,
    Header,
    Mode,
    TensorRow,
    check_length,
    read_header,
    write_container,
)
from protocol.patch.frames import encode_frame
from protocol.patch.sparse import Scratch
from protocol.patch.values import Bits, bits_of, layout_of

_local: Final = local()  # each thread keeps its scratch memory, from tensor to tensor and from patch to patch

S = TypeVar("S")
T = TypeVar("T")

SMALL_ELEMENTS: Final = 1 << 20
"""A tensor of fewer elements shares its frame, and so a model, with others."""

Pair = tuple[Bits, Bits]
"""The elements of a tensor, flat, before and after."""

Digests = Mapping[str, bytes]
"""The BLAKE3 of each tensor's bytes, by name."""


class EncodedTensor(NamedTuple):
    """A tensor of a patch, with its BLAKE3 before and after; its frame is empty if unchanged or joined to another."""

    row: TensorRow
    frame: memoryview
    before: bytes
    after: bytes


def for_each(work: Callable[[S], T], items: Iterable[S], threads: int) -> list[T]:
    """Do some work for each item, on so many threads, and return the results in their order."""
    if threads == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


def digest_bits(bits: Bits) -> bytes:
    """Compute the BLAKE3 of a tensor's elements (32 bytes) on the calling thread."""
    return blake3(bits.view(np.uint8).data).digest()


def small_pairs(old: Weights, new: Weights) -> dict[str, Pair]:
    """Return the elements of the small tensors, by name."""
    return {
        name: (bits_of(old[name]), bits_of(tensor)) for name, tensor in new.items() if tensor.numel() < SMALL_ELEMENTS
    }


def units(new: Weights, pairs: Mapping[str, Pair]) -> list[tuple[str, ...]]:
    """Return the names of each frame's tensors, in ascending order: of one, or of small ones that change alike."""
    result: list[tuple[str, ...]] = []
    small: dict[tuple[str, bool], list[str]] = {}
    for name, tensor in new.items():
        changes = 0
        if name in pairs:
            before, after = pairs[name]
            changes = int(np.count_nonzero(before != after))
        if changes:
            # Tensors in which most elements change need a model of their own.
            small.setdefault((type_name(tensor.dtype), 2 * changes > tensor.numel()), []).append(name)
        else:
            result.append((name,))
    for names in small.values():
        # Tensors of one shape have the same task in different layers.
        names.sort(key=lambda name: (new[name].shape, name))
        unit, elements = list[str](), 0
        for name in names:
            elements += new[name].numel()
            if elements > MAX_JOINED_ELEMENTS:
                result.append(tuple(sorted(unit)))
                unit, elements = [], new[name].numel()
            unit.append(name)
        result.append(tuple(sorted(unit)))
    return result


def encode_unit_frame(
    pairs: Sequence[Pair], last: torch.Tensor, profile: str, scratch: Scratch
) -> tuple[Mode, int, memoryview]:
    """Encode the frame of some tensors, of which `last` is the last one; see `encode_frame`."""
    layout = layout_of(last.dtype)
    if len(pairs) == 1:
        return encode_frame(*pairs[0], last.shape, layout, profile, scratch)
    before, after = (scratch.joined(number, bits) for number, bits in enumerate(zip(*pairs, strict=True)))
    return encode_frame(before, after, before.shape, layout, profile, scratch)


def check_same_tensors(old: Weights, new: Weights) -> None:
    """Raise ValueError unless old and new weights have the same names, dtypes and shapes."""
    if old.keys() != new.keys():
        raise ValueError("old and new weights must have the same tensors")
    for name, before in old.items():
        type_name(before.dtype)
        after = new[name]
        if before.dtype != after.dtype or before.shape != after.shape:
            raise ValueError(f"{name}: old and new weights must have the same dtypes and shapes")


class PatchEncoder:
    """The encoding of a patch, some tensors at a time: only their frames, and a `Scratch` a thread, are in memory."""

    def __init__(self, profile: str, *, threads: int = 1) -> None:
        if profile not in PROFILES:
            raise ValueError(f"no profile {profile!r}: {' or '.join(PROFILES)}")
        self._profile = profile
        self._threads = threads
        self.tensors: dict[str, EncodedTensor] = {}

    def add(
        self, old: Weights, new: Weights, *, base_digests: Digests | None = None, digests: Digests | None = None
    ) -> None:
        """Encode more tensors, of the last version and the next; digests as for `encode`."""
        check_same_tensors(old, new)
        small = small_pairs(old, new)

        def encode_unit(names: tuple[str, ...]) -> list[EncodedTensor]:
            if not hasattr(_local, "scratch"):
                _local.scratch = Scratch()
            pairs = [small[name] if name in small else (bits_of(old[name]), bits_of(new[name])) for name in names]
            mode, changes, frame = encode_unit_frame(pairs, new[names[-1]], self._profile, _local.scratch)
            *others, last = zip(names, pairs, strict=True)
            joined = [tensor(*item, Mode.JOINED, 0, memoryview(b""), names[-1]) for item in others]
            return [*joined, tensor(*last, mode, changes, frame)]

        def tensor(name: str, pair: Pair, mode: Mode, changes: int, frame: memoryview, host: str = "") -> EncodedTensor:
            before = base_digests[name] if base_digests is not None else digest_bits(pair[0])
            # Equal digests and an empty frame say the same thing. If one of them contradicts the other, a digest that
            # the caller gave belongs to other tensors.
            unchanged = mode == Mode.UNCHANGED
            after = digests[name] if digests is not None else before if unchanged else digest_bits(pair[1])
            if (after == before) != unchanged:
                raise ValueError(f"{name}: a digest of another tensor")
            check = b"" if unchanged or host else after[:CHECK_BYTES]
            row = TensorRow(name, new[name].dtype, tuple(new[name].shape), mode, changes, len(frame), check, host)
            return EncodedTensor(row, frame, before, after)

        for unit in for_each(encode_unit, units(new, small), self._threads):
            self.tensors.update((tensor.row.name, tensor) for tensor in unit)

    def finish(self) -> bytes:
        # Tensors may have been added in any order; those of a patch ascend by name.
        tensors = [self.tensors[name] for name in sorted(self.tensors)]
        rows = {tensor.row.name: tensor.row for tensor in tensors}
        base = weights_digest({tensor.row.name: tensor.before for tensor in tensors}, rows)
        result = weights_digest({tensor.row.name: tensor.after for tensor in tensors}, rows)
        return write_container(self._profile, base, result, [*rows.values()], [tensor.frame for tensor in tensors])


def encode(
    old: Weights,
    new: Weights,
    *,
    profile: str = "compact",
    base_digests: Digests | None = None,
    digests: Digests | None = None,
    threads: int = 1,
) -> bytes:
    """Encode the patch from `old`, the last published version, to `new`, with the same tensors.

    Digests are the BLAKE3 of each old or new tensor, which the caller has computed of these very tensors; without them
    the tensors are read once more. Each thread encodes a tensor at a time, and needs a `Scratch` of memory.

    ValueError if there is no such profile, the tensors differ in name, dtype or shape, are not contiguous on the CPU,
    or a digest is that of another tensor; MalformedError if weights may not have one of the dtypes.
    """
    encoder = PatchEncoder(profile, threads=threads)
    encoder.add(old, new, base_digests=base_digests, digests=digests)
    return encoder.finish()


def summary(patch: bytes) -> Header:
    """Read a patch's preamble and table (hostile bytes), without any weights: MalformedError, LimitError or
    PatchError if it is malformed or contradicts itself, or frames are missing.
    """
    header = read_header(patch)
    check_length(patch, header)
    return header
