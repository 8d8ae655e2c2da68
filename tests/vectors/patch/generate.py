"""Write the golden vectors of docs/spec/patch.md, or check that they are up to date.

    python -m tests.vectors.patch.generate [--check]

`golden.json` contains weights (hex of each tensor's bytes) and the patch between them; `hostile.json` contains patches
for the first golden base, and the class of error that each must cause.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from protocol import patch
from protocol.compression import compress, decompress
from protocol.digest import type_name
from protocol.patch.container import PREAMBLE, read_header
from protocol.patch.fields import varint

HERE = Path(__file__).parent


def _weights(seed: int, dtype: torch.dtype, update: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(seed)
    masters = torch.randn((24, 40), generator=random) * 0.0147
    newer = masters + torch.randn((24, 40), generator=random) * update
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40])
    return (
        {"a.weight": masters.to(dtype), "b.bias": special.to(dtype), "c.scale": torch.ones((), dtype=dtype)},
        {"a.weight": newer.to(dtype), "b.bias": (-special).to(dtype), "c.scale": torch.ones((), dtype=dtype)},
    )


def _rows(
    pair: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return an embedding of which one row in ten changes, alone."""
    old, new = (weights["a.weight"].repeat(8, 1) for weights in pair)
    return {"a.weight": old}, {"a.weight": torch.where((torch.arange(len(old)) % 10 == 0)[:, None], new, old)}


def _plain(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: [
            type_name(tensor.dtype),
            list(tensor.shape),
            tensor.reshape(-1).view(torch.uint8).numpy().tobytes().hex(),
        ]
        for name, tensor in weights.items()
    }


def _dense() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a tensor of which half of the elements change, in many classes."""
    random = torch.Generator().manual_seed(9)
    masters, update = torch.randn((2, 90, 200), generator=random).unbind()
    return {"a.weight": (masters * 1e-2).bfloat16()}, {"a.weight": (masters * 1e-2 + update * 3e-5).bfloat16()}


def golden() -> list[dict[str, Any]]:
    """Build cases of all dtypes, profiles and modes."""
    cases = [
        ("bf16 compact", _weights(1, torch.bfloat16, 2e-6), "compact"),
        ("bf16 fast", _weights(1, torch.bfloat16, 2e-6), "fast"),
        ("bf16 dense", _weights(2, torch.bfloat16, 1.0), "compact"),
        ("f16 compact", _weights(3, torch.float16, 1e-6), "compact"),
        ("f32 compact", _weights(4, torch.float32, 1e-7), "compact"),
        ("f8_e4m3 compact", _weights(5, torch.float8_e4m3fn, 1e-4), "compact"),
        ("f8_e5m2 fast", _weights(6, torch.float8_e5m2, 1e-4), "fast"),
        ("small changes", _weights(7, torch.bfloat16, 2e-7), "compact"),
        ("steps", _dense(), "compact"),
        ("touched rows", _rows(_weights(8, torch.bfloat16, 2e-6)), "compact"),
    ]
    return [
        {"name": name, "profile": profile, "old": _plain(old), "new": _plain(new),
         "patch": patch.encode(old, new, profile=profile).hex()}
        for name, (old, new), profile in cases
    ]  # fmt: skip


def _with_table(data: bytes, table: bytes) -> bytes:
    magic, profile, packed, base, result = PREAMBLE.unpack_from(data)
    repacked = compress(table)
    head = PREAMBLE.pack(magic, profile, len(repacked), base, result)
    return head + repacked + data[PREAMBLE.size + packed :]


def _table(data: bytes) -> bytes:
    packed = PREAMBLE.unpack_from(data)[2]
    return decompress(data[PREAMBLE.size : PREAMBLE.size + packed], 1 << 20)


def _set(data: bytes, offset: int, value: int) -> bytes:
    return data[:offset] + bytes((value,)) + data[offset + 1 :]


def hostile() -> list[dict[str, str]]:
    """Build false variants of the first golden case."""
    old, new = _weights(1, torch.bfloat16, 2e-6)
    data = patch.encode(old, new)
    table, frames = _table(data), read_header(data).frames_begin
    other = patch.encode(new, old)

    cases = [
        ("cut off in the preamble", data[:40], "MalformedError"),
        ("cut off in the table", data[: frames - 3], "MalformedError"),
        ("cut off in a frame", data[:-5], "MalformedError"),
        ("a byte behind the end", data + b"\0", "MalformedError"),
        ("the version before", b"GRP3" + data[4:], "MalformedError"),
        ("fewer tensors", _with_table(data, bytes((2,)) + table[1:3] + table[4:]), "PatchError"),
        ("more tensors", _with_table(data, bytes((4,)) + table[1:4] + bytes(1) + table[4:]), "PatchError"),
        ("joined to none", _with_table(data, table[:1] + bytes((9,)) + table[2:]), "PatchError"),
        ("2^62 changes", _with_table(data, table[:4] + varint(1 << 62) + table[5:]), "LimitError"),
        ("more changes than elements", _with_table(data, table[:4] + varint(967) + table[5:]), "PatchError"),
        ("the wrong base", other, "PatchError"),
        ("17 classes", _set(data, frames, 17), "MalformedError"),
        ("classes of exponents that do not exist", _set(_set(data, frames, 2), frames + 1, 255), "MalformedError"),
        ("a weight out of range", _set(data, frames + 2, 255), "MalformedError"),
        ("no symbol for a step", _set(data, frames + 3, 0), "MalformedError"),
        ("a flipped bit in a section", _set(data, frames + 40, data[frames + 40] ^ 4), "ProtocolError"),
        ("a table that is not zstd", _set(data, PREAMBLE.size, 0), "MalformedError"),
    ]
    return [{"name": name, "patch": variant.hex(), "error": error} for name, variant, error in cases]


def files() -> dict[str, str]:
    """Return the contents of every vector file."""
    return {f"{make.__name__}.json": json.dumps(make(), indent=1) + "\n" for make in (golden, hostile)}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for name, content in files().items():
        if not check:
            (HERE / name).write_text(content)
        elif (HERE / name).read_text() != content:
            raise SystemExit(f"{name} differs from what this code generates")


if __name__ == "__main__":
    main()
