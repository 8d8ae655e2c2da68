"""Every coding gives back what it says it sent, and the rest is the error feedback, exactly."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import errors, pseudogradient
from protocol.digest import digest_weights
from protocol.errors import ContributionError
from protocol.pseudogradient import DILOCO, Coding, Kind, Payload, parts_of
from protocol.pseudogradient.arithmetic import add_contribution, divide
from protocol.pseudogradient.chunk_frames import decode_chunks, encode_chunks, quantize
from protocol.pseudogradient.chunks import LEVELS
from tests.pseudogradient.updates import Weights, updated, weights

CODINGS = [
    Coding(Kind.DENSE),
    Coding(Kind.EXACT),
    Coding(Kind.GRID),
    Coding(Kind.GRID, fraction=3),
    Coding(Kind.GRID, fraction=8),
    Coding(Kind.CHUNKED, chosen=1),
    Coding(Kind.CHUNKED, chosen=128),
    Coding(Kind.CHUNKED, chosen=1024),
]
RATES = [0.0, 1e-9, 1e-6, 1e-4, 1e-1, 1e10]


def values_of(payload: Payload, base: Weights) -> Weights:
    """Return what a receiver decodes, by name."""
    result: Weights = {}
    for part, values in pseudogradient.decode(payload, base, digest_weights(base)):
        result |= part.scatter(values)
    return result


def view(values: np.ndarray) -> np.ndarray:
    """Return the BF16 bit patterns."""
    bits = torch.from_numpy(np.asarray(values)).bfloat16().view(torch.int16).numpy()
    assert isinstance(bits, np.ndarray)
    return bits


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_values_and_error_feedback_add_up_to_the_update(coding: Coding, rate: float) -> None:
    base = weights()
    local, feedback = updated(base, rate), {name: tensor * 1e-7 for name, tensor in weights(2).items()}
    contribution = pseudogradient.encode(base, local, feedback, coding, digest_weights(base))
    decoded = values_of(contribution.payload, base)
    for name in base:
        update = feedback[name].numpy() + (base[name].numpy() - local[name].numpy())
        sent, rest = decoded[name].numpy(), contribution.residual[name].numpy()
        assert np.array_equal(rest, update - sent)
        if coding.kind in (Kind.GRID, Kind.EXACT):
            assert np.array_equal(sent + rest, update)
    assert sum(contribution.head.entries) >= sum(int((t != 0).sum()) for t in decoded.values())


@pytest.mark.parametrize("rate", RATES)
def test_the_gate_sends_each_exact_value_that_changes_the_view_and_no_other(rate: float) -> None:
    base, coding = weights(), Coding(Kind.EXACT)
    local = updated(base, rate)
    contribution = pseudogradient.encode(base, local, None, coding, digest_weights(base))
    for name, sent in values_of(contribution.payload, base).items():
        old = base[name].numpy()
        update = old - local[name].numpy()
        visible = view(old) != view(old - update)
        assert np.array_equal(sent.numpy(), np.where(visible, update, np.float32(0)))
        assert not np.asarray(contribution.residual[name])[visible].any()


@pytest.mark.parametrize("fraction", [0, 3, 8])
@pytest.mark.parametrize("rate", RATES[:-1])
def test_each_grid_value_that_is_sent_changes_the_view(rate: float, fraction: int) -> None:
    base, coding = weights(), Coding(Kind.GRID, fraction=fraction)
    contribution = pseudogradient.encode(base, updated(base, rate), None, coding, digest_weights(base))
    for name, sent in values_of(contribution.payload, base).items():
        old, values = base[name].numpy(), sent.numpy()
        assert ((view(old) != view(old - values)) == (values != 0)).all()


def test_exact_values_of_an_ordinary_update_have_ranks() -> None:
    random = np.random.default_rng(0)
    base = {"w": torch.from_numpy(random.standard_normal((512, 512)).astype(np.float32) * np.float32(0.0147))}
    contribution = pseudogradient.encode(base, updated(base, 8e-6), None, Coding(Kind.EXACT), digest_weights(base))
    assert 8 * sum(map(len, contribution.payload)) < 22 * sum(contribution.head.entries)


def test_a_sign_of_zero_is_sent() -> None:
    base, tiny = {"w": torch.zeros(64, 64)}, 1e-44
    contribution = pseudogradient.encode(base, {"w": base["w"] - tiny}, None, Coding(Kind.EXACT), digest_weights(base))
    assert (values_of(contribution.payload, base)["w"] == torch.tensor(tiny)).all()


@given(st.integers(0, 2**32 - 1), st.floats(-12, 4), st.sampled_from(CODINGS), st.integers(1, 300), st.integers(1, 300))
@settings(max_examples=2 * settings().max_examples, deadline=None)
def test_any_weights_and_any_update(seed: int, size: float, coding: Coding, rows: int, columns: int) -> None:
    random = np.random.default_rng(seed)
    scales = np.exp2(random.uniform(-60, 5, (rows, columns)))
    base = {"w": torch.from_numpy((random.standard_normal((rows, columns)) * scales).astype(np.float32))}
    local = updated(base, 10.0**size, seed)
    contribution = pseudogradient.encode(base, local, None, coding, digest_weights(base))
    sent = values_of(contribution.payload, base)["w"].numpy()
    assert np.array_equal((base["w"].numpy() - local["w"].numpy()) - sent, contribution.residual["w"].numpy())


def test_an_update_that_is_not_finite_is_refused() -> None:
    base = weights()
    local = updated(base, 1e-6)
    local["scale"] = torch.tensor(float("nan"))
    for coding in CODINGS:
        with pytest.raises(ContributionError, match="not finite"):
            pseudogradient.encode(base, local, None, coding, digest_weights(base))


def test_tensors_that_do_not_fit_are_refused() -> None:
    base = weights()
    for wrong in (torch.zeros(96, 96), base["scale"].double(), torch.zeros(130, 96).T[:, :1]):
        local = updated(base, 1e-6) | {"scale": wrong}
        with pytest.raises(ContributionError, match="scale: not a contiguous float32 tensor"):
            pseudogradient.encode(base, local, None, Coding(Kind.DENSE), digest_weights(base))


# The largest entries of a chunk are chosen, and their indices take the entropy of a subset


@pytest.mark.parametrize("chosen", [32, 128, 512])
def test_entries_take_at_most_a_hundredth_more_than_their_entropy(chosen: int) -> None:
    update = np.random.default_rng(0).standard_normal(512 * 4096).astype(np.float32)
    rest = update.copy()
    entries, frame = encode_chunks(rest, [(2048, 1024)], chosen)
    assert entries == 512 * chosen
    # The bits of a choice of so many of a chunk, and those of the levels by their own frequencies.
    shares = np.unique((update - rest)[update != rest], return_counts=True)[1] / entries
    bound = 512 * math.log2(math.comb(4096, chosen)) - entries * (shares * np.log2(shares)).sum()
    assert 8 * len(frame) < 1.01 * bound


@pytest.mark.parametrize("shape", [(4096,), (64, 64), (100, 130), (1,), (), (3, 5, 7), (65, 1), (5000,)])
@pytest.mark.parametrize("chosen", [1, 128, 1024])
def test_the_largest_of_each_chunk_are_sent(shape: tuple[int, ...], chosen: int) -> None:
    update = np.random.default_rng(1).standard_normal(math.prod(shape)).astype(np.float32)
    rest = update.copy()
    entries, frame = encode_chunks(rest, [shape], chosen)
    decoded_values = np.empty_like(update)
    decode_chunks(memoryview(frame), [shape], chosen, decoded_values)
    assert np.array_equal(update - decoded_values, rest)
    matrix, values = (a.reshape(shape[0] if len(shape) > 1 else 1, -1) for a in (update, decoded_values))
    height, width = (64, 64) if len(shape) > 1 else (1, 4096)
    count = 0
    for top in range(0, matrix.shape[0], height):
        for left in range(0, matrix.shape[1], width):
            chunk = np.abs(matrix[top : top + height, left : left + width]).ravel()
            own = (values[top : top + height, left : left + width] != 0).ravel()
            k = max(1, chosen * chunk.size // 4096)
            assert set(np.flatnonzero(own)) == set(np.argsort(-chunk, kind="stable")[:k])
            count += k
    assert count == entries


def test_of_equal_entries_the_first_are_sent() -> None:
    update = np.ones(4096, np.float32)
    update[4000] = -2.0
    _, frame = encode_chunks(update.copy(), [(4096,)], 4)
    decoded_values = np.empty_like(update)
    decode_chunks(memoryview(frame), [(4096,)], 4, decoded_values)
    assert np.flatnonzero(decoded_values).tolist() == [0, 1, 2, 4000]


def test_levels_are_the_means_of_their_bins() -> None:
    values = np.concatenate((np.full(10, -1.0), np.full(10, 1.0), np.full(1, 9.0))).astype(np.float32)
    levels, lookup = quantize(values)
    for level in range(LEVELS):
        own = values[levels == level]
        assert lookup[level] == (np.float32(own.mean()) if own.size else 0)


# The golden contributions give their values, and hostile ones are refused with the same class of error


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
