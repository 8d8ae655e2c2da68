"""Confidence bounds on the rates that calibration counts."""

import numpy as np
import torch


def rate_bounds(events: np.ndarray, trials: int, confidence: float) -> np.ndarray:
    """Compute upper bounds on rates after so many events in `trials` independent trials: float64 [C] from integer [C].

    Each true rate lies below its bound with at least the given confidence. The bound is that of a Poisson distribution
    (Garwood 1936), which has more small counts than the binomial one of the same mean (Anderson and Samuels 1967).
    """
    if trials <= 0 or not 0.0 < confidence < 1.0:
        raise ValueError("a bound needs trials and a confidence between 0 and 1")
    counts = torch.from_numpy(np.asarray(events, dtype=np.float64))
    low, high = torch.zeros_like(counts), torch.full_like(counts, float(trials))
    for _ in range(100):
        middle = (low + high) / 2
        too_low = torch.special.gammaincc(counts + 1.0, middle) > 1.0 - confidence  # P(X <= events) at this mean
        low, high = torch.where(too_low, middle, low), torch.where(too_low, high, middle)
    return high.numpy() / trials
