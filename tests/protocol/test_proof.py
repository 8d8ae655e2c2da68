"""The table of thresholds of a run, and what a pair of arithmetics may and may not do."""

from typing import Any

import pytest
from pydantic import ValidationError

from protocol.errors import PairError
from protocol.proof import ARITHMETICS, CALIBRATED, Table, arithmetic_of, pairs_of
from tests.support.builders import samples
from tests.support.builders.proofs import proof_of
from tests.support.builders.samples import thresholds

NARROW = thresholds()
WIDE = thresholds(miner="torch-bfloat16", logprob_tolerance=500_000, logprob_bias=3_000)
ACROSS = thresholds(validator="torch-bfloat16", logprob_tolerance=400_000, logprob_bias=4_000)
BOTH = thresholds(miner="torch-bfloat16", validator="torch-bfloat16", logprob_tolerance=300_000)
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
    assert proof.logprob_bounds("torch-bfloat16", "torch-bfloat16") == (300_000, 1_000)


def test_validators_of_one_arithmetic_are_compared_by_their_own_row() -> None:
    proof = proof_of(*TABLE)
    assert proof.logprob_bounds("torch-float32", "torch-float32") == (50_000, 1_000)
    assert proof.logprob_bounds("torch-bfloat16", "torch-bfloat16") == (300_000, 1_000)
    for one, other in (("torch-float32", "torch-bfloat16"), ("torch-bfloat16", "torch-float32")):
        assert proof.logprob_bounds(one, other) == (500_000, 4_000)  # the larger ones of both orders
    assert proof.logprob_bounds("torch-float32", "vllm-float32")[0] < 0  # nothing agrees


def test_a_table_of_replays_has_the_one_step_that_a_group_is_counted_by() -> None:
    for beyond in ((1,), (0, 1)):
        steps = samples.table(beyond, (0.05, 0.01)[: len(beyond)], (0.4, 1.0)[: len(beyond)])
        with pytest.raises(ValidationError, match="a table of replays with other steps than 0"):
            thresholds(replay=steps)


def alternative(*scores: int, growth: int = 1000) -> dict[str, Any]:
    return {"scores": scores, "growth": growth}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beyond": (10, 10)}, "do not strictly ascend"),
        ({"beyond": (-1, 10)}, "beyond.0"),
        ({"beyond": (10, 1 << 31)}, "beyond.1"),
        ({"rates": (10**12, 10**15)}, "rates that rise"),
        ({"rates": (10**15,)}, "not one rate for each step"),
        ({"rates": (10**18, 10**15)}, "rates.0"),  # a certainty is no step
        ({"rates": (10**15, 0)}, "rates.1"),
        ({"alternatives": ()}, "at least 1 item"),
        ({"alternatives": (alternative(1000),)}, "not one score for each step"),
        ({"alternatives": (alternative(2000, 1000),)}, "scores that fall"),
        ({"alternatives": (alternative(-1, 1000),)}, "scores.0"),
        ({"alternatives": (alternative(1, 1000, growth=0),)}, "growth"),  # evidence would not restart
        ({"alternatives": (alternative(1, 2),) * 17}, "at most 16 items"),
    ],
    ids=str,
)
def test_a_table_that_is_none(changes: dict[str, Any], message: str) -> None:
    fields = samples.table((10, 20), (1e-3, 1e-6), (0.5, 0.5)).model_dump()
    with pytest.raises(ValidationError, match=message):
        Table(**(fields | changes))


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
        (
            {"table": (thresholds(miner="torch-bfloat16", stop=samples.table((10,), (0.1,), (0.5,))), NARROW)},
            "different numbers of alternatives",
        ),
        ({"table": (WIDE, samples.replay_thresholds())}, "rows with different statistics"),
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
        with pytest.raises(ValidationError, match="none of the known ones"):
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
