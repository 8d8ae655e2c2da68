"""Thresholds and rules of the check for tests and benches."""

from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from grailnode.calibration import proof_file
from grailnode.engine.policy import PACKAGED_POLICY
from protocol.judging.evidence import Counts, Evidence, advance
from protocol.proof import MEASURED, Alternative, Arithmetic, ProofSpec, StatisticName, Table, Thresholds

FLOAT32: Final[tuple[Arithmetic, Arithmetic]] = ("torch-float32", "torch-float32")
"""The arithmetics of a miner and a validator, as nodes have them by default."""

BFLOAT16: Final[tuple[Arithmetic, Arithmetic]] = ("torch-bfloat16", "torch-bfloat16")
"""Those of nodes that compute in bfloat16."""


_NOTHING: Final = Table(
    beyond=((1 << 31) - 1,), rates=(1,), alternatives=(Alternative(scores=(0,), growth=1),)
)  # not even a margin that is no number reaches its step

LENIENT: Final[dict[str, Any]] = dict.fromkeys(MEASURED, _NOTHING)
"""Values of thresholds that refuse nothing."""


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


def by_statistic(evidence: Evidence, row: Thresholds) -> dict[StatisticName, Evidence]:
    """Return the evidence of the alternatives of each statistic; nothing if there is none."""
    named = zip(row.alternatives, evidence, strict=False)
    return {name: tuple(value for _, value in own) for name, own in groupby(named, key=itemgetter(0))}


def advance_window(evidence: Evidence, counts: Counts, thresholds: Thresholds) -> Evidence:
    """Return the evidence with which the window begins that follows one of these counts (docs/spec/verdict.md)."""
    return tuple(min(value, thresholds.threshold) for value in advance(evidence, counts, thresholds))
