"""Weights for the patch tests: any bit pattern of any dtype that weights may have."""

from collections.abc import Mapping

import numpy as np
import torch
from hypothesis import strategies as st

from protocol import patch
from protocol.digest import type_names
from protocol.patch.applying import Changes, apply_frame
from protocol.patch.container import Mode, TensorRow, read_header, split_frames
from protocol.patch.values import bits_of

DTYPES = sorted(type_names, key=str)


def from_bits(values: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if values.size == 0:
        return torch.empty(shape, dtype=dtype)
    width = dtype.itemsize
    raw = np.ascontiguousarray(values.astype(f"<u{width}")).view(np.uint8)
    return torch.from_numpy(raw.copy()).view(dtype).reshape(shape)


def same_bits(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and torch.equal(a[name].reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8))
        for name in a
    )


def rounded_update(
    rows: int, columns: int, share: float, seed: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return masters before and after a small update, rounded to `dtype`; about `share` percent of BF16 elements
    change.
    """
    random = torch.Generator().manual_seed(seed)
    masters = torch.randn((rows, columns), generator=random) * 0.0147
    update = torch.randn((rows, columns), generator=random) * 1.2e-6 * share
    return masters.to(dtype), (masters + update).to(dtype)


def round_trip(old: torch.Tensor, new: torch.Tensor, profile: str = "compact") -> bytes:
    """Return the patch from one tensor `w` to another, and check that it gives every bit and every change."""
    data = patch.encode({"w": old}, {"w": new}, profile=profile)
    assert same_bits(patch.apply({"w": old}, data), {"w": new})
    header = read_header(data)
    for (row,), frame in split_frames(data, header, header.table.units({"w": old})):
        if row.mode != Mode.UNCHANGED:
            check_changes(old, new, row, frame)
    return data


def check_changes(old: torch.Tensor, new: torch.Tensor, row: TensorRow, frame: memoryview) -> None:
    """Check that a frame, decoded in place, gives the new tensor, and as changes the difference of the tensors."""
    tensor, found = old.clone(), list[Changes]()
    apply_frame(tensor, row, frame, tensor, found)
    assert same_bits({"w": tensor}, {"w": new})
    indices, values = map(np.concatenate, zip(*found, strict=True))
    expected = np.flatnonzero(bits_of(old) != bits_of(new))
    order = np.argsort(indices)
    assert np.array_equal(indices[order], expected)
    assert np.array_equal(values[order], bits_of(new)[expected])


SPECIAL = {
    1: (0x00, 0x80, 0x7F, 0xFF, 0x7C, 0x7E, 0x01, 0x81),
    2: (0x0000, 0x8000, 0x7FC0, 0xFFC1, 0x7F80, 0xFF80, 0x7C00, 0x0001, 0x8001, 0x7FFF, 0xFFFF),
    4: (0x00000000, 0x80000000, 0x7FC00001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x00000001, 0x80000001),
}
"""Zeros, NaN payloads, infinities and denormals, by width in bytes."""


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw an old and a new tensor of one dtype and shape with any bit patterns, from equal to entirely different."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 24), max_size=3)))
    width = dtype.itemsize
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = int(np.prod(shape))
    patterns = random.integers(0, 1 << (8 * width), size, dtype=np.uint64)
    special = random.random(size) < draw(st.sampled_from((0.0, 0.3)))
    patterns[special] = random.choice(np.array(SPECIAL[width], dtype=np.uint64), int(special.sum()))
    mask = random.random(size) < draw(st.sampled_from((0.0, 0.01, 0.3, 1.0)))
    reach = draw(st.sampled_from((1, 3, 1 << (8 * width - 1))))
    steps = random.integers(-reach, reach, size, endpoint=True)
    new = np.where(mask, patterns.astype(np.int64) + steps, patterns.astype(np.int64)) & ((1 << (8 * width)) - 1)
    return from_bits(patterns, dtype, shape), from_bits(new, dtype, shape)
