"""Pairs with vLLM on one side or both."""

from pathlib import Path

from grailnode.calibration.variants import Variant, run_pairs
from grailnode.calibration.vllm_variant import SMALL_BATCH, VllmVariant
from grailnode.engine.policy import Policy

TORCH = Variant()


def test_pairs_with_vllm_vary_what_each_engine_can_vary(policy: Policy) -> None:
    vllm = VllmVariant(Path("python"), Path("directory"), "0.32.0")
    both, generating, checking = (
        {pair.name: pair for pair in run_pairs(one, other, policy)}
        for one, other in ((vllm, vllm), (vllm, TORCH), (TORCH, vllm))
    )
    assert list(both) == ["same", "small-batches"]
    assert list(generating) == ["same", "small-batches", "alone-checked", "left-padding", "eager-checked"]
    assert generating["small-batches"].generating == VllmVariant(
        Path("python"), Path("directory"), "0.32.0", sequences=SMALL_BATCH
    )
    assert {"alone-generated", "eager-generated", "two-threads", "transformers"} < set(checking)
    assert {pair.checking for pair in checking.values()} == {vllm}
    assert str(vllm) == "vllm 0.32.0 float32 on cpu, 256 sequences"
