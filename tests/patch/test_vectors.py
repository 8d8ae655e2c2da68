"""Golden vectors stay readable, and hostile vectors are refused with the same class of error."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol import errors, patch
from protocol.digest import dtypes
from protocol.patch.container import read_header, split_frames
from tests.patch.weights import same_bits

FOLDER = Path(__file__).parent.parent / "vectors" / "patch"
GOLDEN = json.loads((FOLDER / "golden.json").read_text())
HOSTILE = json.loads((FOLDER / "hostile.json").read_text())


def weights(plain: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: torch.frombuffer(bytearray.fromhex(data), dtype=dtypes[dtype]).reshape(shape)
        for name, (dtype, shape, data) in plain.items()
    }


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_golden(case):
    old, new, data = weights(case["old"]), weights(case["new"]), bytes.fromhex(case["patch"])
    assert same_bits(patch.apply(old, data), new)
    again = patch.encode(old, new, profile=case["profile"])
    assert coded_frames(again) == coded_frames(data)  # the output of zstd may differ between releases


def coded_frames(data: bytes) -> dict[str, bytes]:
    header = read_header(data)
    frames = zip(header.rows, split_frames(data, header), strict=True)
    return {row.name: bytes(frame) for row, frame in frames if row.mode in (patch.Mode.SPARSE, patch.Mode.STEPS)}


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case["name"])
def test_hostile(case):
    with pytest.raises(getattr(errors, case["error"])):
        patch.apply(weights(GOLDEN[0]["old"]), bytes.fromhex(case["patch"]))
