"""`grailnode calibrate` without the terminal: honest pairs, then copies, then thresholds or a refusal."""

import platform
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch

from grailnode.calibration import measure, separation
from grailnode.calibration.copies import quantized
from grailnode.calibration.measure import ThresholdDemands, beyond
from grailnode.calibration.pairs import CalibrationTask, GroupMeasurement, observe
from grailnode.calibration.proof_file import CopyRow, Measurement, PairRow, Proof
from grailnode.calibration.variants import Pair
from grailnode.engine import policy as policies
from protocol.digest import Weights, digest_weights
from protocol.run import ProofSpec

COPIES: Final = (3, separation.DUE_BITS, 8)
"""Bits of the copies that are tried; the others are for information."""
_COPY_GROUPS: Final = 64
_GROUPED: Final = 4  # one honest rollout of so many is in a group, where it shares most of its states


class Progress(Protocol):
    """Told how far one pair is."""

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` rollouts of a pair, or of a copy by a pair."""


@dataclass(frozen=True)
class CalibrationJob:
    """A calibration to be run.

    Attributes:
        work: policy, prompts and sampling; prompts: where they are from, in a word.
        pairs: whose work a run will meet.
        rollouts: of each pair: a quarter in whole groups, as a run has them, the others each of a prompt of its own,
            because rollouts of one prompt share most of their states.
    """

    work: CalibrationTask
    prompts: str
    pairs: Sequence[Pair]
    rollouts: int
    demands: ThresholdDemands = field(default_factory=ThresholdDemands)

    @property
    def groups(self) -> tuple[int, int]:
        """How many groups of a pair are whole, and how many of one rollout."""
        grouped = -(-self.rollouts // _GROUPED // self.work.group_size)
        return grouped, max(0, self.rollouts - grouped * self.work.group_size)


async def calibrate(job: CalibrationJob, progress: Progress, show: Callable[[Sequence[PairRow]], None]) -> Proof:
    """Measure, choose thresholds, and try them on copies.

    Args:
        show: is given the honest distribution before anything is refused.

    Raises:
        CalibrationError: too few groups; TooWideError: a copy is not told apart.
        PolicyError, EngineError: a variant cannot compute this policy.
    """
    measure.check_groups(sum(job.groups))
    weights = policies.load_weights(job.work.policy.directory)
    honest = {pair.name: await _honest(job, pair, weights, progress) for pair in job.pairs}
    copies = await _copies(job, honest, weights, progress)
    due = [observed for (bits, _), observed in copies.items() if bits == separation.DUE_BITS]
    spec = measure.thresholds(honest, due, job.work.kind, job.demands)
    rows = [_row(pair, honest[pair.name], spec) for pair in job.pairs]
    show(rows)
    window = job.demands.window
    powers = [separation.power(bits, pair, observed, spec, window) for (bits, pair), observed in copies.items()]
    separation.check(powers, honest, spec, window)
    measured = Measurement(
        policy=digest_weights(weights).hex(),
        prompts=job.prompts,
        temperature=job.work.params.temperature,
        max_tokens=job.work.params.max_tokens,
        group_size=job.work.group_size,
        seed=job.work.seed,
        headroom=job.demands.headroom,
        window=window,
        torch=str(torch.__version__),
        processor=_processor(),
        pairs=tuple(rows),
        copies=tuple(CopyRow(**power.__dict__) for power in powers),
    )
    return Proof(thresholds=spec, measured=measured)


async def _honest(job: CalibrationJob, pair: Pair, weights: Weights, progress: Progress) -> list[GroupMeasurement]:
    grouped, single = job.groups
    total = grouped * job.work.group_size + single
    apart = replace(job.work, group_size=1)
    parts = observe(job.work, pair, weights, grouped), observe(apart, pair, weights, single, first=grouped)
    return await _watched(parts, pair.name, total, progress)


async def _watched(
    parts: Sequence[AsyncIterator[GroupMeasurement]], what: str, total: int, progress: Progress
) -> list[GroupMeasurement]:
    """All groups of the parts, one part behind another, with progress."""
    observed: list[GroupMeasurement] = []
    done = 0
    progress(what, done, total)
    for part in parts:
        async for group in part:
            observed.append(group)
            done += len(group.lengths)
            progress(what, done, total)
    return observed


async def _copies(
    job: CalibrationJob, honest: measure.Honest, weights: Weights, progress: Progress
) -> dict[tuple[int, str], list[GroupMeasurement]]:
    """What the check sees of copies: by the first pair and by the one with the widest noise."""
    groups = min(-(-job.rollouts // job.work.group_size), _COPY_GROUPS)
    widest = max(job.pairs, key=lambda pair: _width(honest[pair.name]))
    chosen = {pair.name: pair for pair in (job.pairs[0], widest)}
    found = {}
    for bits in COPIES:
        copy = quantized(weights, bits)
        for name, pair in chosen.items():
            part = observe(job.work, pair, weights, groups, claimed=copy)
            total = groups * job.work.group_size
            found[bits, name] = await _watched([part], f"{bits}-bit copy, {name}", total, progress)
    return found


def _width(groups: Sequence[GroupMeasurement]) -> float:
    shifts = np.concatenate([group.shifts for group in groups])
    return float(np.quantile(np.nan_to_num(shifts, nan=np.inf), 0.99, method="lower"))


def _row(pair: Pair, groups: Sequence[GroupMeasurement], spec: ProofSpec) -> PairRow:
    distances = np.concatenate([group.fresh for group in groups])
    margins = np.nan_to_num(np.concatenate([group.margins for group in groups]), nan=1e6, posinf=1e6)
    shifts = np.nan_to_num(np.concatenate([group.shifts for group in groups]), nan=1e6, posinf=1e6)
    middle, high, highest, top = (float(np.quantile(distances, q, method="higher")) for q in (0.5, 0.99, 0.999, 1.0))
    wide, wider, widest = (float(np.quantile(margins, q, method="higher")) for q in (0.99, 0.999, 1.0))
    return PairRow(
        name=pair.name,
        generating=str(pair.generating),
        checking=str(pair.checking),
        tokens=len(margins),
        positions=len(distances),
        distances=(middle, high, highest, top),
        sketch_misses=float(beyond(distances, spec.sketch_tolerance).mean()),
        margins=(wide, wider, widest),
        margin_misses=float(beyond(margins, spec.margin).mean()),
        largest_shift=float(shifts.max()),
    )


def _processor() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
