"""Thresholds and rules of the check for tests and benches."""

from collections.abc import Iterable
from typing import Any, Final

from grailnode.calibration import proof_file
from grailnode.engine.policy import PACKAGED_POLICY
from protocol.judging.evidence import CountedWindow, Counts
from protocol.proof import Arithmetic, ProofSpec, Step, Thresholds

FLOAT32: Final[tuple[Arithmetic, Arithmetic]] = ("torch-float32", "torch-float32")
"""The arithmetics of a miner and a validator, as nodes have them by default."""

BFLOAT16: Final[tuple[Arithmetic, Arithmetic]] = ("torch-bfloat16", "torch-bfloat16")
"""Those of nodes that compute in bfloat16."""


LENIENT: Final[dict[str, Any]] = {
    "sketch_tolerance": 64,
    "sketch_rate": 0.999,
    "sketch_steps": (Step(beyond=64.0, rate=0.999, points=1),),
    "sketch_median": 64,
    "margin": 100.0,
    "margin_rate": 0.999,
    "margin_steps": (Step(beyond=100.0, rate=0.999, points=1),),
    "far_margin": 100.0,
    "far_rate": 0.999,
    "margin_limit": 100.0,
}
"""Values of thresholds that refuse next to nothing."""


def packaged_thresholds(miner: Arithmetic = "torch-float32", validator: Arithmetic = "torch-float32") -> Thresholds:
    """Return the thresholds of the packaged policy for miners and validators in these arithmetics."""
    return proof_file.read(PACKAGED_POLICY / proof_file.NAME).row(miner, validator)


def proof_of(*rows: Thresholds, **changes: Any) -> ProofSpec:
    """Return the rules of a run that admits the miners of these rows, and audits everything."""
    fields: dict[str, Any] = {
        "sketch": "projection",
        "miners": tuple(sorted({row.miner for row in rows})),
        "table": tuple(sorted(rows, key=lambda row: row.pair)),
        "audit_ppm": 1_000_000,
        "audit_floor_ppm": 1_000_000,
        "audit_halving": 16,
    }
    return ProofSpec(**(fields | changes))


def with_thresholds(proof: ProofSpec, **changes: Any) -> ProofSpec:
    """Return rules with other values in every row."""
    return proof.model_copy(update={"table": tuple(row.model_copy(update=changes) for row in proof.table)})


def windows_of(counts: Iterable[Counts], thresholds: Thresholds) -> list[CountedWindow]:
    """Return windows that were counted by the same thresholds."""
    return [CountedWindow(item, thresholds) for item in counts]
