"""Altered contributions are refused with a ProtocolError, or give finite values of the norm that their head states."""

import math
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch

from protocol import pseudogradient
from protocol.digest import digest_weights
from protocol.errors import ContributionError, LimitError, MalformedError, ProtocolError
from protocol.pseudogradient import Coding, Head, Kind, parts_of, read_head, write_head
from tests.pseudogradient.updates import updated, weights
from tests.support.pytest_options.few_daily import few_daily

BASE = weights()
DIGEST = digest_weights(BASE)
PARTS = parts_of({name: tensor.shape for name, tensor in BASE.items()})
CODINGS = [Coding(Kind.DENSE), Coding(Kind.EXACT), Coding(Kind.GRID, fraction=3), Coding(Kind.CHUNKED, chosen=128)]


def payload(coding: Coding) -> bytes:
    (file,) = pseudogradient.encode(BASE, updated(BASE, 3e-5), None, coding, DIGEST).payload
    return bytes(file[:])


def decoded(data: bytes, max_norm: float = math.inf) -> np.ndarray:
    return np.concatenate([v for _, v in pseudogradient.decode((data,), BASE, DIGEST, max_norm=max_norm)])


def with_head(data: bytes, alter: Callable[[Head], Head]) -> bytes:
    head = read_head(data, PARTS)
    return write_head(alter(head)) + data[len(write_head(head)) :]


def replaced(**fields: object) -> Callable[[Head], Head]:
    """Return a function that replaces fields of a head."""
    return lambda head: Head(**{name: fields.get(name, getattr(head, name)) for name in Head.__slots__})  # type: ignore[arg-type]


@pytest.mark.parametrize("coding", CODINGS[1:], ids=str)
@pytest.mark.parametrize("seed", few_daily(range(2, 5), 3))
def test_mutations_of_the_frames(coding: Coding, seed: int) -> None:
    data, random = payload(coding), np.random.default_rng(seed)
    begin = len(write_head(read_head(data, PARTS)))
    for _ in range(1000):
        altered = bytearray(data)
        for _ in range(int(random.integers(1, 4))):
            altered[int(random.integers(begin, min(len(data), begin + 400)))] = int(random.integers(256))
        with suppress(ProtocolError):
            decoded(bytes(altered))


@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_every_cut(coding: Coding) -> None:
    data = payload(coding)
    for size in [*range(0, 120), *range(120, len(data), len(data) // 50)]:
        with pytest.raises((MalformedError, ContributionError)):
            decoded(data[:size])
    with pytest.raises(MalformedError):
        decoded(data + b"\0")


@pytest.mark.parametrize(
    ("alter", "error", "message"),
    [
        (replaced(squared_norm=math.nan), MalformedError, "no finite number"),
        (replaced(squared_norm=-1.0), MalformedError, "no finite number"),
        (replaced(sizes=(1 << 40,)), LimitError, "at most"),
    ],
)
def test_heads_that_contradict_themselves_or_the_weights(
    alter: Callable[[Head], Head], error: type[ProtocolError], message: str
) -> None:
    with pytest.raises(error, match=message):
        decoded(with_head(payload(Coding(Kind.GRID, fraction=3)), alter))


def test_a_norm_above_the_limit_is_refused_before_any_frame_is_read() -> None:
    data = payload(Coding(Kind.DENSE))
    norm = math.sqrt(read_head(data, PARTS).squared_norm)
    assert decoded(data, norm * 1.01).size
    with pytest.raises(LimitError, match="norm"):
        read_head(data[:200], PARTS, max_norm=norm * 0.99)


def test_a_chunked_contribution_with_another_number_of_entries() -> None:
    data = payload(Coding(Kind.CHUNKED, chosen=128))
    entries = read_head(data, PARTS).entries[0]
    with pytest.raises(ContributionError, match="instead of"):
        decoded(with_head(data, replaced(entries=(entries - 1,))))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2.0**-10, "out of the dtype"),  # a multiple of the weight's unit, which has a rank
        (math.inf, "out of the dtype"),
        (1e-20, "changes no BF16 weight"),
    ],
)
def test_values_without_a_rank_that_are_none(value: float, message: str) -> None:
    base = {"w": torch.full((64, 64), 0.01)}
    feedback = {"w": torch.zeros(64, 64)}
    feedback["w"][3, 4] = 1e-3 / 3
    (file,) = pseudogradient.encode(base, base, feedback, Coding(Kind.EXACT), digest_weights(base)).payload
    data = bytes(file[:])
    tensor_values = next(iter(pseudogradient.decode((data,), base, digest_weights(base))))[1]
    assert np.array_equal(tensor_values, feedback["w"].numpy().ravel())
    assert data[-4:] == np.float32(1e-3 / 3).tobytes()
    altered = data[:-4] + np.float32(value).tobytes()
    with pytest.raises(ContributionError, match=message):
        list(pseudogradient.decode((altered,), base, digest_weights(base)))
