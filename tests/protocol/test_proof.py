"""The table of thresholds of a run, and what a pair of arithmetics may and may not do."""

from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from protocol.errors import PairError
from protocol.proof import ARITHMETICS, CALIBRATED, Step, arithmetic_of, pairs_of
from tests.support.builders import samples
from tests.support.builders.proofs import proof_of
from tests.support.builders.samples import thresholds

NARROW = thresholds()
WIDE = thresholds(
    miner="torch-bfloat16", sketch_rate=0.01, margin=0.1, margin_limit=5.0, logprob_tolerance=0.5, level=1e-8
)
ACROSS = thresholds(validator="torch-bfloat16", sketch_median=9, logprob_tolerance=0.4)
BOTH = thresholds(miner="torch-bfloat16", validator="torch-bfloat16", logprob_tolerance=0.3)
TABLE = (NARROW, WIDE, ACROSS, BOTH)


def test_a_row_is_found_by_its_pair() -> None:
    proof = proof_of(*TABLE)
    for row in TABLE:
        assert proof.row(*row.pair) == row
    assert (proof.miners, proof.validators) == 2 * (("torch-bfloat16", "torch-float32"),)


def test_a_pair_that_is_not_admitted_has_no_row() -> None:
    proof = proof_of(NARROW, WIDE)
    for pair in (("vllm-float32", "torch-float32"), ("torch-float32", "torch-bfloat16"), ("exact", "exact"), ("", "")):
        with pytest.raises(
            PairError, match="it admits miners in torch-bfloat16, torch-float32 and validators in torch"
        ):
            proof.row(*pair)


def test_rows_of_validators_alone_admit_no_miner() -> None:
    proof = proof_of(*TABLE, miners=("torch-float32",))
    assert proof.row("torch-float32", "torch-bfloat16") == ACROSS
    for validator in proof.validators:
        with pytest.raises(PairError):
            proof.row("torch-bfloat16", validator)
    assert proof.logprob_tolerance("torch-bfloat16", "torch-bfloat16") == BOTH.logprob_tolerance


def test_validators_of_one_arithmetic_are_compared_by_their_own_row() -> None:
    proof = proof_of(*TABLE)
    assert proof.logprob_tolerance("torch-float32", "torch-float32") == NARROW.logprob_tolerance
    assert proof.logprob_tolerance("torch-bfloat16", "torch-bfloat16") == BOTH.logprob_tolerance
    for one, other in (("torch-float32", "torch-bfloat16"), ("torch-bfloat16", "torch-float32")):
        assert proof.logprob_tolerance(one, other) == WIDE.logprob_tolerance  # the larger one of both orders
    assert proof.logprob_tolerance("torch-float32", "vllm-float32") < 0  # nothing agrees


def test_the_widest_thresholds_tolerate_what_any_validator_does() -> None:
    widest = proof_of(*TABLE).widest("torch-bfloat16")
    assert (widest.margin, widest.margin_limit, widest.logprob_tolerance) == (0.1, 5.0, 0.5)
    assert (widest.sketch_rate, widest.level) == (0.01, 1e-9)
    assert proof_of(*TABLE).widest("torch-float32").sketch_median == 9
    with pytest.raises(PairError):
        proof_of(*TABLE, miners=("torch-float32",)).widest("torch-bfloat16")


def test_points_are_as_probable_by_the_widest_steps_as_by_those_of_any_row() -> None:
    first = [Step(beyond=0.1, rate=0.02, points=4), Step(beyond=0.2, rate=1e-3, points=20)]
    second = [Step(beyond=0.0, rate=0.01, points=7), Step(beyond=3.0, rate=5e-3, points=15)]
    rows = (
        thresholds(miner="torch-bfloat16", validator="torch-bfloat16", margin_steps=tuple(first)),
        thresholds(miner="torch-bfloat16", margin_steps=tuple(second)),
        thresholds(validator="torch-bfloat16"),
        thresholds(),
    )
    widest = proof_of(*rows, miners=("torch-bfloat16", "torch-float32")).widest("torch-bfloat16").margin_steps

    def rate(steps: Sequence[Step], points: int) -> float:
        """Return the bound on the probability of at least so many points."""
        return next((step.rate for step in steps if step.points >= points), 0.0)

    for points in range(1, 25):
        assert rate(widest, points) == max(rate(first, points), rate(second, points))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table": (NARROW, WIDE)}, "not one row of thresholds for each pair"),
        ({"table": (WIDE,)}, "not one row of thresholds for each pair"),  # none for two validators
        ({"table": (WIDE, NARROW, NARROW)}, "not one row of thresholds for each pair"),
        ({"table": (BOTH, WIDE, NARROW)}, "not one row of thresholds for each pair"),
        ({"miners": ("torch-float32", "torch-bfloat16")}, "do not strictly ascend"),
        ({"miners": ()}, "at least 1 item"),
        ({"miners": ("torch-float16",)}, "miners"),
        ({"miners": ("vllm-float32",)}, "not one row of thresholds for each pair"),
        ({"table": ()}, "at least 1 item"),
        ({"audit_floor_ppm": 500_000, "audit_ppm": 400_000}, "audit_floor_ppm exceeds audit_ppm"),
    ],
)
def test_an_incomplete_table_is_none(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        proof_of(WIDE, NARROW, **changes)


def test_a_calibrated_run_has_no_exact_nodes() -> None:
    exact = thresholds(miner="exact", validator="exact")
    with pytest.raises(ValidationError, match="admits exact arithmetic"):
        samples.run_manifest(proof=proof_of(exact))
    with pytest.raises(ValidationError, match="tolerate something"):
        samples.run_manifest(proof=proof_of(exact), numerics="exact")


def test_the_vocabulary_is_closed() -> None:
    assert list(ARITHMETICS) == sorted(ARITHMETICS)
    assert set(ARITHMETICS) == {"exact", *CALIBRATED}
    assert [arithmetic_of(*name.split("-")) for name in CALIBRATED] == list(CALIBRATED)
    with pytest.raises(ValueError, match="no arithmetic for torch in float16; there are: torch-bfloat16"):
        arithmetic_of("torch", "float16")
    for name in ("torch-float16", "TORCH-FLOAT32"):
        with pytest.raises(ValidationError, match="no arithmetic"):
            samples.announcement(arithmetic=name)
    with pytest.raises(ValidationError, match="does not say how"):
        samples.announcement(arithmetic="")
    assert samples.announcement(arithmetic="", groups=0).arithmetic == ""


def test_the_pairs_that_a_run_needs() -> None:
    assert pairs_of(["torch-bfloat16"], ["torch-float32"]) == [
        ("torch-bfloat16", "torch-float32"),
        ("torch-float32", "torch-float32"),
    ]
    assert len(pairs_of(CALIBRATED, CALIBRATED)) == 16
