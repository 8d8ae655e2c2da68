"""The golden contributions give their values, and hostile ones are refused with the same class of error."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocol import errors, pseudogradient
from protocol.digest import digest_weights
from protocol.pseudogradient import DILOCO, Coding, Kind, parts_of
from protocol.pseudogradient.arithmetic import add_contribution, divide

FOLDER = Path(__file__).parent.parent / "vectors" / "pseudogradient"
GOLDEN = json.loads((FOLDER / "golden.json").read_text())
HOSTILE = json.loads((FOLDER / "hostile.json").read_text())


def parsed(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a file."""
    return {
        name: torch.from_numpy(np.frombuffer(bytes.fromhex(data), "<f4").reshape(shape).copy())
        for name, (shape, data) in tensors.items()
    }


BASE, LOCAL, FEEDBACK = (parsed(GOLDEN[name]) for name in ("base", "local", "feedback"))
DIGEST = digest_weights(BASE)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_golden(case: dict[str, Any]) -> None:
    payload = (bytes.fromhex(case["payload"]),)
    ((part, values),) = pseudogradient.decode(payload, BASE, DIGEST)
    assert digest_weights(part.scatter(values)) == digest_weights(parsed(case["values"]))
    coding = Coding(Kind[case["kind"]], case["fraction"], case["chosen"])
    assert pseudogradient.encode(BASE, LOCAL, FEEDBACK, coding, DIGEST).payload == payload


def test_the_outer_step() -> None:
    part, step = parts_of({name: tensor.shape for name, tensor in BASE.items()})[0], GOLDEN["step"]
    mean = np.zeros(part.elements, np.float32)
    for case, weight in zip(GOLDEN["cases"], step["weights"], strict=True):
        add_contribution(mean, part.gather(parsed(case["values"])), weight)
    divide(mean, len(GOLDEN["cases"]))
    base, momentum = part.gather(BASE).copy(), part.gather(FEEDBACK).copy()
    DILOCO.step(base, momentum, mean)
    for name, values in (("mean", mean), ("base", base), ("momentum", momentum)):
        assert digest_weights(part.scatter(values)) == digest_weights(parsed(step[name])), name


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case["name"])
def test_hostile(case: dict[str, str]) -> None:
    with pytest.raises(errors.ProtocolError) as raises:
        list(pseudogradient.decode((bytes.fromhex(case["payload"]),), BASE, DIGEST))
    assert type(raises.value).__name__ == case["error"]
