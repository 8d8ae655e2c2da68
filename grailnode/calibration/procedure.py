"""`grailnode calibrate` without the terminal: measures honest pairs and copies, then chooses thresholds or refuses."""

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from grailnode import UserError
from grailnode.calibration import thresholds
from grailnode.calibration.pairs import CalibrationTask, GroupMeasurement, Submission, check_groups, generate_groups
from grailnode.calibration.proof_file import (
    CopyRow,
    MeasuredAdapters,
    MeasuredRow,
    PairRow,
    ProofFile,
    RowMeasurement,
    Subject,
)
from grailnode.calibration.thresholds import ThresholdDemands
from grailnode.calibration.variants import AnyVariant, Pair, VllmServers
from grailnode.engine import policy as policies
from grailnode.engine.lora_model import initial_adapters, merged_weights
from grailnode.engine.models import build
from protocol.digest import Weights, digest_weights
from protocol.judging.evidence import weigh
from protocol.lora import DOWN, PREFIX, UP, LoraSpec
from protocol.proof import Arithmetic, Thresholds

GROUP: Final = 32
"""Weights that share a scale and a zero: as few as in any 4-bit format in use, so that the copy is a good one."""

_UNROUNDED: Final = ("embed", "lm_head")  # such formats do not round them
ADAPTER_SHARE: Final = 0.05
"""By how much an adapter changes its matrix unless the founder says otherwise (docs/adr/0340)."""


def quantized(weights: Weights, bits: int) -> dict[str, Tensor]:
    """Return the weights of a quantized checkpoint: each group of 32 rounded to 2**bits even steps over its range.

    Only matrices are rounded, and not the embedding and the output projection, which makes the copy better. Shapes and
    dtypes stay.
    """

    def is_rounded(name: str, tensor: Tensor) -> bool:
        return tensor.dim() == 2 and not any(part in name for part in _UNROUNDED)

    return {name: _rounded(tensor, bits) if is_rounded(name, tensor) else tensor for name, tensor in weights.items()}


def _rounded(tensor: Tensor, bits: int) -> Tensor:
    rows, columns = tensor.shape
    wide = torch.nn.functional.pad(tensor.to(torch.float32), (0, -columns % GROUP), mode="replicate")
    groups = wide.reshape(rows, -1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(torch.float32).tiny)
    steps = ((groups - low) / step).round()
    rounded: Tensor = (low + steps * step).reshape(rows, -1)[:, :columns]
    return rounded.to(tensor.dtype).contiguous()


def random_adapters(
    base: Weights, shapes: Mapping[str, tuple[int, ...]], scale: float, share: float, seed: int
) -> dict[str, Tensor]:
    """Return BF16 adapters by PEFT's names, with A as in version 0 and a random B. `scale` is alpha / rank; `share` is
    by how much an adapter changes its matrix: |alpha / rank B A| / |W|, Frobenius norms.
    """
    adapters = initial_adapters({PREFIX + name: shape for name, shape in shapes.items() if name.endswith((DOWN, UP))})
    generator = torch.Generator().manual_seed(seed)
    for name in [name for name in adapters if name.endswith(UP)]:
        module = name.removesuffix(UP)
        down = adapters[module + DOWN].to(torch.float32)
        up = torch.randn(adapters[name].shape, generator=generator)
        length = ((up.t() @ up) * (down @ down.t())).sum().sqrt() * scale  # of the product, which is not computed
        matrix = base[f"{module.removeprefix(PREFIX)}.weight"]
        adapters[name] = (up * (share * matrix.to(torch.float32).norm() / length)).to(torch.bfloat16)
    return adapters


REQUIRED_BITS: Final = 4
"""A copy with weights of so many bits has to be refused."""
REQUIRED_POWER: Final = 0.99
"""Share of its windows that has to be refused."""
_WINDOWS: Final = 1000

COPIES: Final = (3, REQUIRED_BITS, 8)
"""Bits of the copies that are measured; only one of them is required to be refused, the others inform the user."""
_COPY_GROUPS: Final = 64
_GROUPED: Final = 4  # one of so many honest rollouts is in a whole group, where rollouts share most of their states


Copies = dict[tuple[int, str], list[GroupMeasurement]]
"""Measurements of copies, by the bits of their weights and the name of a pair."""


Progress = Callable[[str, int, int], None]
"""Shows that so many rollouts of so many are generated in some way, or checked by a pair; copies have their own."""


@dataclass(frozen=True)
class CalibrationJob:
    """The inputs of a calibration."""

    work: CalibrationTask
    prompts: str
    arithmetics: tuple[Arithmetic, Arithmetic]
    pairs: Sequence[Pair]  # the pairs of honest nodes of these arithmetics that will occur in a run
    # of each pair: a quarter in whole groups, as in a run, the others with a prompt for each, because rollouts of one
    # prompt share most of their states
    rollouts: int
    demands: ThresholdDemands = field(default_factory=ThresholdDemands)
    adapter_share: float = ADAPTER_SHARE  # by how much random adapters change their matrices, where the run trains some
    replies: str | None = None  # of the environment that replies in episodes (`Subject`)

    @property
    def groups(self) -> tuple[int, int]:
        """The number of whole groups of a pair, and of groups of one rollout."""
        grouped = -(-self.rollouts // _GROUPED // self.work.group_size)
        return grouped, max(0, self.rollouts - grouped * self.work.group_size)


@dataclass(frozen=True)
class _Part:
    """Some groups of one task, from a number on."""

    work: CalibrationTask
    groups: int
    first: int = 0


async def calibrate(job: CalibrationJob, progress: Progress, show: Callable[[Sequence[PairRow]], None]) -> ProofFile:
    """Measure, choose the thresholds of a row, and test them on copies; return a file with this row."""
    grouped, single = job.groups
    thresholds.check_groups(grouped + single)
    base, lora = policies.load_weights(job.work.policy.directory), job.work.lora
    weights, merged = (base, base) if lora is None else _with_adapters(job, base, lora)
    servers = VllmServers()
    measurer = _Measurer(job, weights, servers, progress)
    try:
        parts = [_Part(job.work, grouped), _Part(replace(job.work, group_size=1), single, grouped)]
        honest = await measurer.measure(job.pairs, parts)
        copies = await _copies(measurer, honest, merged)
    finally:
        await servers.close()
    required = [groups for (bits, _), groups in copies.items() if bits == REQUIRED_BITS]
    spec = thresholds.choose_thresholds(honest, required, job.arithmetics, job.demands)
    rows = [_row(pair, honest[pair.name]) for pair in job.pairs]
    show(rows)
    window = job.demands.window
    powers = [power(bits, pair, groups, spec, window) for (bits, pair), groups in copies.items()]
    check_power(powers, window)
    subject = Subject(
        policy=digest_weights(base).hex(),
        prompts=job.prompts,
        chat=job.work.chat is not None,
        lora=None if lora is None else MeasuredAdapters.of(lora, job.adapter_share),
        temperature=job.work.params.temperature,
        max_tokens=job.work.params.max_tokens,
        group_size=job.work.group_size,
        sketch=job.work.kind,
        turns=job.work.turns,
        replies=job.replies,
    )
    measurement = RowMeasurement(
        seed=job.work.seed,
        level=job.demands.level,
        headroom=job.demands.headroom,
        window=window,
        torch=str(torch.__version__),
        processor=_processor(),
        pairs=tuple(rows),
        copies=tuple(powers),
    )
    return ProofFile(subject=subject, table=(MeasuredRow(thresholds=spec, measured=measurement),))


def _with_adapters(job: CalibrationJob, base: Weights, lora: LoraSpec) -> tuple[Weights, Weights]:
    """Return the weights of a base with random adapters: beside each other by the names of the modules, and merged."""
    shapes = build(job.work.policy, lora=lora).shapes
    adapters = random_adapters(base, shapes, lora.scale, job.adapter_share, job.work.seed)
    beside = {name.removeprefix(PREFIX): tensor for name, tensor in adapters.items()}
    return {**base, **beside}, merged_weights(base, adapters, lora.scale)


@dataclass(frozen=True)
class _Measurer:
    """Measures pairs."""

    job: CalibrationJob
    weights: Weights
    servers: VllmServers
    progress: Progress

    async def measure(
        self, pairs: Iterable[Pair], parts: Sequence[_Part], *, copy: Weights | None = None, name: str = ""
    ) -> dict[str, list[GroupMeasurement]]:
        """Measure pairs, by their names. Those that generate in one way check the same rollouts."""
        measurements = {}
        by_side: dict[AnyVariant, list[Pair]] = {}
        for pair in pairs:
            by_side.setdefault(pair.generating, []).append(pair)
        for side, sharing in by_side.items():
            submissions = await self._generate(side, parts, copy, f"{name}generating with {side}")
            for pair in sharing:
                measurements[pair.name] = await self._check(pair, submissions, f"{name}{pair.name}")
        return measurements

    async def _generate(
        self, side: AnyVariant, parts: Sequence[_Part], copy: Weights | None, name: str
    ) -> list[tuple[CalibrationTask, list[Submission]]]:
        """Generate groups in one way; each chunk comes with its task."""
        policy, lora = self.job.work.policy, self.job.work.lora
        weights, lora = (self.weights, lora) if copy is None else (copy, None)
        total, rollouts = sum(part.groups * part.work.group_size for part in parts), 0
        self.progress(name, rollouts, total)  # before vLLM starts, which takes a while
        engine = await self.servers.serve(side, policy, weights, lora)
        submissions = []
        for part in parts:
            async for chunk in generate_groups(part.work, engine, part.groups, first=part.first):
                submissions.append((part.work, chunk))
                rollouts += sum(len(submission.requests) for submission in chunk)
                self.progress(name, rollouts, total)
        return submissions

    async def _check(
        self, pair: Pair, submissions: Sequence[tuple[CalibrationTask, list[Submission]]], name: str
    ) -> list[GroupMeasurement]:
        total = sum(len(submission.requests) for _, chunk in submissions for submission in chunk)
        self.progress(name, 0, total)
        engine = await self.servers.serve(pair.checking, self.job.work.policy, self.weights, self.job.work.lora)
        groups: list[GroupMeasurement] = []
        for work, chunk in submissions:
            groups += await check_groups(work, engine, chunk)
            self.progress(name, sum(len(group.lengths) for group in groups), total)
        return groups


async def _copies(measurer: _Measurer, honest: thresholds.Honest, merged: Weights) -> Copies:
    """Measure copies of weights (adapters in the same matrices) with the first pair and that of the widest noise."""
    job = measurer.job
    groups = min(-(-job.rollouts // job.work.group_size), _COPY_GROUPS)
    widest = max(job.pairs, key=lambda pair: _width(honest[pair.name]))
    pairs = {pair.name: pair for pair in (job.pairs[0], widest)}.values()
    measurements: Copies = {}
    for bits in COPIES:
        copy = quantized(merged, bits)
        by_pair = await measurer.measure(pairs, [_Part(job.work, groups)], copy=copy, name=f"{bits}-bit copy, ")
        measurements |= {(bits, pair.name): by_pair[pair.name] for pair in pairs}
    return measurements


def power(bits: int, pair: str, groups: Sequence[GroupMeasurement], spec: Thresholds, window: int) -> CopyRow:
    """Return the shares of a copy's groups that the thresholds refuse; windows are random selections of groups."""
    counts = [group.counts(spec) for group in groups]
    added = np.array([weigh(item, spec) for item in counts])

    def refused(selections: np.ndarray) -> float:
        """Return the share of selections [S, groups] that `is_improbable` refuses, all of which are weighed at once."""
        evidence = highest = np.zeros((len(selections), added.shape[1]), np.int64)
        for part in selections.T:
            evidence = np.maximum(evidence, 0) + added[part]
            highest = np.maximum(highest, evidence)
        return float(np.mean(highest.max(axis=1) > spec.threshold))

    return CopyRow(
        bits=bits,
        pair=pair,
        tokens=sum(item.margin.trials for item in counts),
        groups=refused(np.arange(len(counts))[:, None]),
        windows=refused(np.random.default_rng(0).integers(0, len(counts), (_WINDOWS, window))),
    )


def check_power(powers: Sequence[CopyRow], window: int) -> None:
    """Check that a copy of REQUIRED_BITS is refused; raise UserError if one of the pairs does not refuse it."""
    weak = min((item for item in powers if item.bits == REQUIRED_BITS), key=lambda item: item.windows)
    if weak.windows < REQUIRED_POWER:
        raise UserError(
            f"the honest distribution is too wide: of a {REQUIRED_BITS}-bit copy's windows of {window} groups (pair "
            f"{weak.pair}), {weak.windows:.1%} are refused where {REQUIRED_POWER:.0%} are required; leave out the "
            "pairs with the largest distances and margins (--pairs), or measure more --rollouts"
        )


def _width(groups: Sequence[GroupMeasurement]) -> float:
    shifts = np.concatenate([group.shifts for group in groups])
    return float(np.quantile(np.nan_to_num(shifts, nan=np.inf), 0.99, method="lower"))


def _row(pair: Pair, groups: Sequence[GroupMeasurement]) -> PairRow:
    distances, stops = (np.concatenate([group.values[name] for group in groups]) for name in ("sketch", "stop"))
    margins = np.nan_to_num(np.concatenate([group.margins for group in groups]), nan=1e6, posinf=1e6)
    shifts = np.nan_to_num(np.concatenate([group.shifts for group in groups]), nan=1e6, posinf=1e6)
    middle, high, highest, top = np.quantile(distances, (0.5, 0.99, 0.999, 1.0), method="higher").tolist()
    wide, wider, widest = np.quantile(margins, (0.99, 0.999, 1.0), method="higher").tolist()
    return PairRow(
        name=pair.name,
        generating=str(pair.generating),
        checking=str(pair.checking),
        tokens=len(margins),
        positions=len(distances),
        distances=(middle, high, highest, top),
        margins=(wide, wider, widest),
        margin_misses=float((margins > 0).mean()),
        stop_misses=float((stops > 0).mean()),
        largest_shift=float(shifts.max()),
    )


def _processor() -> str:
    """Return the processor's name as the operating system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
