"""The golden vectors of docs/spec/pseudogradient.md, which `python -m tests.vectors.regenerate` writes.

`golden.json` contains weights, local weights and error feedback (shape, and hex of the float32 bytes, of each tensor),
the contribution of each coding, the values that it gives, and the weights and the momentum after an outer step.
`hostile.json` contains contributions for the same weights, and the class of error that each must cause.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protocol import pseudogradient
from protocol.digest import digest_weights
from protocol.pseudogradient import DILOCO, Coding, Kind, parts_of, read_head, write_head
from protocol.pseudogradient.arithmetic import Floats, add_contribution, divide

HERE = Path(__file__).parent
SHAPES = {"a.weight": (12, 40), "b.bias": (7,), "c.scale": ()}
CODINGS = {
    "dense": Coding(Kind.DENSE),
    "exact": Coding(Kind.EXACT),
    "grid": Coding(Kind.GRID, fraction=3),
    "chunked": Coding(Kind.CHUNKED, chosen=128),
}


def weights(seed: int, scale: float) -> dict[str, torch.Tensor]:
    """Return FP32 weights from a seed; numpy keeps this generator's stream (NEP 19)."""
    random = np.random.RandomState(seed)
    return {
        name: torch.from_numpy(np.asarray(random.uniform(-scale, scale, shape), np.float32))
        for name, shape in SHAPES.items()
    }


def mean_of(contributions: Sequence[Floats], factors: Sequence[float]) -> Floats:
    """Return the mean of one part of several contributions, in their order: float32 [n]."""
    total = np.zeros_like(contributions[0])
    for values, factor in zip(contributions, factors, strict=True):
        add_contribution(total, values, factor)
    divide(total, len(contributions))
    return total


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return shape and bytes (hex) of tensors."""
    return {
        name: [list(tensor.shape), tensor.numpy().astype("<f4").tobytes().hex()] for name, tensor in tensors.items()
    }


def _inputs() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    base = weights(1, 0.03)
    base["b.bias"] = torch.tensor([0.0, -0.0, 1e-40, 1.0, 0.99999994, -2.0, 0.50195313])
    step, feedback = weights(2, 4e-5), weights(3, 1e-6)
    return base, {name: base[name] - step[name] for name in base}, feedback


def golden() -> dict[str, Any]:
    """Build the inputs, and a case for each coding."""
    base, local, feedback = _inputs()
    digest, cases, values = digest_weights(base), [], []
    for name, coding in CODINGS.items():
        contribution = pseudogradient.encode(base, local, feedback, coding, digest)
        ((part, decoded),) = pseudogradient.decode(contribution.payload, base, digest)
        values.append(decoded)
        flat_values = plain(part.scatter(decoded))
        fields = {"kind": coding.kind.name, "fraction": coding.fraction, "chosen": coding.chosen}
        cases.append(
            {"name": name} | fields | {"payload": bytes(contribution.payload[0][:]).hex(), "values": flat_values}
        )
    part = parts_of(SHAPES)[0]
    mean, shared, momentum = (
        mean_of(values, [1.0, 1.0, 0.3, 1.0]),
        part.gather(base).copy(),
        part.gather(feedback).copy(),
    )
    DILOCO.step(shared, momentum, mean)
    step = {"weights": [1.0, 1.0, 0.3, 1.0], "mean": plain(part.scatter(mean))}
    step |= {"base": plain(part.scatter(shared)), "momentum": plain(part.scatter(momentum))}
    return {"base": plain(base), "local": plain(local), "feedback": plain(feedback), "cases": cases, "step": step}


def hostile() -> list[dict[str, str]]:
    """Build false variants of the golden contributions."""
    base, local, feedback = _inputs()
    digest, parts = digest_weights(base), parts_of(SHAPES)
    data = {
        name: bytes(pseudogradient.encode(base, local, feedback, coding, digest).payload[0][:])
        for name, coding in CODINGS.items()
    }
    grid = data["grid"]
    begin, chunked_begin = (len(write_head(read_head(data[name], parts))) for name in ("grid", "chunked"))
    infinity = np.array([np.inf], "<f4").tobytes()

    def changed(source: bytes, offset: int, new: bytes) -> bytes:
        return source[:offset] + new + source[offset + len(new) :]

    cases = [
        ("empty", b"", "MalformedError"),
        ("an earlier version", changed(grid, 0, b"GRG2"), "MalformedError"),
        ("a kind that does not exist", changed(grid, 4, b"\4"), "MalformedError"),
        ("a fraction of 9", changed(grid, 5, b"\t"), "MalformedError"),
        ("a grid with chosen entries", changed(grid, 6, b"\1"), "MalformedError"),
        ("two parts", changed(grid, 8, b"\2"), "ContributionError"),
        ("other weights", changed(grid, 12, b"\0\0\0\0"), "ContributionError"),
        ("another number of entries", changed(grid, 76, b"\1"), "ContributionError"),
        ("another norm", changed(grid, 84, b"\1\2"), "ContributionError"),
        ("an infinite norm", changed(grid, 84, np.array([np.inf], "<f8").tobytes()), "MalformedError"),
        ("files of less than 4 KiB", changed(grid, 92, b"\0\2\0\0"), "LimitError"),
        ("files of 2 GiB", changed(grid, 92, b"\0\0\0\x80"), "LimitError"),
        ("more entries than elements", changed(grid, 96, b"\xff\x7f"), "LimitError"),
        ("cut off in the head", grid[:97], "MalformedError"),
        ("a digest of a file that there is not", grid[:begin] + bytes(32) + grid[begin:], "MalformedError"),
        ("cut off in a frame", grid[:-1], "MalformedError"),
        ("a byte behind the end", grid + b"\0", "MalformedError"),
        ("a reference exponent below the floor", changed(grid, begin + 2, b"\7"), "MalformedError"),
        ("no classes", changed(grid, begin + 3, b"\0"), "MalformedError"),
        ("17 classes", changed(grid, begin + 3, b"\x11"), "MalformedError"),
        ("a value that is not finite", data["dense"][:-4] + infinity, "ContributionError"),
        ("a level that is not finite", changed(data["chunked"], chunked_begin, infinity), "ContributionError"),
        ("chunks with classes", changed(data["chunked"], chunked_begin + 16, b"\1"), "MalformedError"),
        ("another value", data["exact"][:-9] + b"\xaa" + data["exact"][-8:], "ContributionError"),
    ]
    return [{"name": name, "payload": payload.hex(), "error": error} for name, payload, error in cases]


def texts() -> dict[str, str]:
    """Return the contents of each file."""
    return {
        "golden.json": json.dumps(golden(), indent=1) + "\n",
        "hostile.json": "[\n" + ",\n".join(map(json.dumps, hostile())) + "\n]\n",
    }
