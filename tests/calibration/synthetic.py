"""Measurements from known distributions."""

import numpy as np

from grailnode.calibration.pairs import GroupMeasurement

ROLLOUTS = 4


def groups(
    count: int,
    *,
    miss: float = 0.0,
    distance: int = 9,
    tip: float = 0.0,
    margin: float = 0.5,
    shift: float = 1e-6,
    length: int = 20,
    seed: int = 0,
) -> list[GroupMeasurement]:
    """Return groups whose positions are off by `distance` with probability `miss`, and whose tokens by `margin` with
    probability `tip`.
    """
    generator = np.random.default_rng(seed)
    measurements = []
    for _ in range(count):
        lengths = tuple(int(n) for n in generator.integers(length // 2, length + 1, ROLLOUTS))
        n = sum(lengths)
        measurements.append(
            GroupMeasurement(
                lengths,
                np.where(generator.random(n) < miss, distance, 0).astype(np.int16),
                np.zeros(n, dtype=bool),
                np.where(generator.random(n) < tip, margin, 0.0).astype(np.float32),
                (shift * np.abs(generator.standard_normal(n))).astype(np.float32),
            )
        )
    return measurements


COPY = groups(40, miss=0.9, tip=0.5, seed=99)
"""A copy that any reasonable thresholds refuse."""
