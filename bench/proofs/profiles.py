"""The kinds of nodes of the tables: each has its honest pairs, and a row of thresholds that was measured on them.

`float32` and `bfloat16` are this machine's kernels. In the third one miner and validator add independent errors to the
values of bfloat16, which is what other kernels and GPUs do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch

from bench.proofs.rounding import Inaccurate, RoundingErrors
from bench.proofs.setting import CALIBRATION_SEED, Setting
from bench.proofs.sides import Pair, Side
from grailnode.calibration.procedure import quantized
from grailnode.calibration.thresholds import ThresholdDemands, choose_thresholds
from grailnode.calibration.variants import DType, Variant, run_pairs
from protocol.proof import Arithmetic, Thresholds
from roles.policy.causal_model import CausalModel
from tests.support.adversaries.harness import TrialHarness
from tests.support.builders.proofs import proof_of

_GROUPS: Final = 256  # of each pair that calibration measures
_COPY_GROUPS: Final = 64
_OF_ERRORS: Final = ("same", "small-batches", "eager-checked")


@dataclass(frozen=True)
class Profile:
    """A kind of nodes.

    Attributes:
        name: of the profile.
        dtype: in which all its nodes compute.
        errors: of all its nodes.
    """

    name: str
    dtype: DType
    errors: RoundingErrors | None = None

    @property
    def arithmetics(self) -> tuple[Arithmetic, Arithmetic]:
        """Those of miners and validators."""
        arithmetic: Arithmetic = "torch-float32" if self.dtype == "float32" else "torch-bfloat16"
        return arithmetic, arithmetic

    @property
    def plain(self) -> Side:
        """How most nodes compute."""
        return Side(Variant(dtype=self.dtype), self.errors)

    def pairs(self, setting: Setting) -> dict[str, Pair]:
        """Return the honest pairs by their names."""
        variant = self.plain.variant
        pairs = {
            pair.name: Pair(replace(self.plain, variant=pair.generating), replace(self.plain, variant=pair.checking))
            for pair in run_pairs(variant, variant)
            if isinstance(pair.generating, Variant) and isinstance(pair.checking, Variant)
        }
        if self.errors is not None:
            return {name: pairs[name] for name in _OF_ERRORS}
        return {name: pair for name, pair in pairs.items() if name not in setting.excluded_pairs}

    async def thresholds(self, setting: Setting, headroom: float | None = None) -> Thresholds:
        """Return the row of the profile, from stored measurements if there are any.

        Args:
            headroom: instead of that by default.
        """
        demands = ThresholdDemands() if headroom is None else ThresholdDemands(headroom=headroom)
        pairs = self.pairs(setting)
        honest = await setting.measure(self.name, pairs, group_counts(pairs, _GROUPS), CALIBRATION_SEED)
        copy = {"4-bit copy": Pair(replace(self.plain, weights=lambda weights: quantized(weights, 4)), self.plain)}
        copies = await setting.measure(self.name, copy, {"4-bit copy": _COPY_GROUPS}, CALIBRATION_SEED)
        return choose_thresholds(honest, list(copies.values()), self.arithmetics, demands)

    def harness(self, setting: Setting, thresholds: Thresholds, groups: int) -> TrialHarness:
        """Return the harness of a run of such nodes, whose concurrent windows share batches.

        Args:
            groups: groups of a window.
        """

        def change(model: CausalModel) -> CausalModel:
            return model if self.errors is None else Inaccurate(model, self.errors, 0)

        harness = setting.harness(groups, concurrent=True)
        return replace(harness, proof=proof_of(thresholds), dtype=getattr(torch, self.dtype), change=change)


def group_counts(pairs: Mapping[str, Pair], groups: int) -> dict[str, int]:
    """Return how many groups of each pair are measured: a quarter of those that compute every sequence alone, which
    takes long.
    """
    return {name: groups // 4 if "alone" in name else groups for name in pairs}


PROFILES: Final = (
    Profile("float32", "float32"),
    Profile("bfloat16", "bfloat16"),
    Profile("errors of 0.02", "bfloat16", RoundingErrors(hidden=2.0**-8, logits=0.02)),
)


def select(part: str) -> list[Profile]:
    """Return the profiles whose names contain `part`, all for an empty one."""
    return [profile for profile in PROFILES if part in profile.name]
