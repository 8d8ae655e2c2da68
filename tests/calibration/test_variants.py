"""Honest ways to compute differ by rounding only; copies of weights do not. Pairs of both are measured."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grailnode.calibration import pairs
from grailnode.calibration.pairs import CalibrationTask, GroupMeasurement
from grailnode.calibration.procedure import quantized
from grailnode.calibration.variants import ALONE, FEW_SEQUENCES, Pair, Variant, VllmVariant, run_pairs
from grailnode.engine.hf import TransformersModel
from grailnode.engine.policy import Policy
from grailnode.engine.qwen3 import Qwen3, Qwen3Config
from protocol.digest import Weights
from roles.policy.causal_model import CausalModel
from tests.support.builders.policies import NOISE, PARAMS, random_weights, requests_of_many_lengths, write_policy
from tests.support.measuring.pair_measurements import measure_pair

BASE = Variant()


async def test_variants_change_rounding_only(policy: Policy, weights: Weights) -> None:
    requests = requests_of_many_lengths(8)
    params = replace(PARAMS, max_tokens=5)
    plain = await (await BASE.serve(policy, weights)).generate(requests, params)
    for variant in (replace(BASE, batch_tokens=ALONE), replace(BASE, attention="eager"), replace(BASE, threads=2)):
        other = await (await variant.serve(policy, weights)).generate(requests, params)
        for one, two in zip(plain, other, strict=True):
            assert one.tokens == two.tokens
            torch.testing.assert_close(one.hidden, two.hidden, rtol=0, atol=NOISE)
    assert torch.get_num_threads() == 1  # restored


def test_eager_attention_is_transformers_eager_attention(policy: Policy) -> None:
    config = Qwen3Config.of(policy.config)
    assert config is not None
    own, theirs = Qwen3(config, attention="eager"), TransformersModel(policy.directory, attention="eager")
    weights = {name: tensor.to(torch.float32) for name, tensor in random_weights(own).items()}
    ids = torch.randint(0, own.vocabulary, (4, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(4, 9, dtype=torch.bool)
    mask[:2, :3] = False
    with torch.inference_mode():
        states = own.hidden(weights, ids, mask), theirs.hidden(weights, ids, mask)
    torch.testing.assert_close(states[0][mask], states[1][mask], rtol=0, atol=NOISE)


def test_the_formula_rounds_no_score_and_no_weight_of_attention(policy: Policy) -> None:
    config = Qwen3Config.of(policy.config)
    assert config is not None
    generator = torch.Generator().manual_seed(5)
    queries, keys, values = (
        (4 * torch.randn(2, heads, 24, config.head_dim, generator=generator)).to(torch.bfloat16)
        for heads in (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    )
    visible = torch.ones(24, 24, dtype=torch.bool).tril()[None, None].expand(2, 1, 24, 24)
    results = Qwen3(config, attention="eager")._attend(queries, keys, values, visible)
    precise = Qwen3(config, attention="sdpa")._attend(
        queries.to(torch.float64), keys.to(torch.float64), values.to(torch.float64), visible
    )
    assert results.dtype == torch.bfloat16
    torch.testing.assert_close(results.to(torch.float64), precise, rtol=2.0**-8, atol=1e-5)  # one rounding to bfloat16


def test_other_architectures_are_computed_by_transformers(tmp_path: Path) -> None:
    policy = write_policy(tmp_path, attention_bias=True)
    model: CausalModel = BASE.model(policy)
    assert isinstance(model, TransformersModel)


# Quantized copies of weights


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_each_group_of_a_copy_has_at_most_2_to_the_bits_values(bits: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 80, generator=generator)  # two whole groups of 32 and a part
    tensors = {"layer.weight": weight, "norm.weight": weight[0], "model.embed_tokens.weight": weight}
    copy = quantized(tensors, bits)
    assert copy["norm.weight"] is tensors["norm.weight"]
    assert copy["model.embed_tokens.weight"] is weight
    for begin in (0, 32, 64):
        part, rounded = weight[:, begin : begin + 32], copy["layer.weight"][:, begin : begin + 32]
        assert all(len(row.unique()) <= 2**bits for row in rounded)
        span = part.amax(1, keepdim=True) - part.amin(1, keepdim=True)
        assert ((part - rounded).abs() <= span / (2**bits - 1) / 2 * 1.001).all()


def test_constant_weights_are_not_changed() -> None:
    flat = {"w": torch.full((2, 32), 0.5, dtype=torch.bfloat16)}
    assert torch.equal(quantized(flat, 4)["w"], flat["w"])


# Measurements of honest pairs and of copies


SAME = Pair("same", BASE, BASE)


async def measure(
    work: CalibrationTask, pair: Pair, weights: Weights, groups: int = 6, **options
) -> list[GroupMeasurement]:
    return [group async for group in measure_pair(work, pair, weights, groups, **options)]


async def test_honest_pairs_agree(work: CalibrationTask, weights: Weights) -> None:
    for pair in run_pairs(BASE, BASE):
        groups = await measure(work, pair, weights)
        assert len(groups) == 6
        for group in groups:
            tokens = sum(group.lengths)
            assert len(group.lengths) == work.group_size
            assert len(group.distances) == len(group.repeats) == len(group.margins) == len(group.shifts) == tokens
            assert not group.repeats[: group.lengths[0]].any()
            # The first state is the prompt's in every rollout.
            assert len(group.values["sketch"]) == tokens - group.repeats.sum() < tokens
            assert group.distances.max() <= 1, pair.name
            assert group.margins.max() < 1e-3, pair.name
            assert group.shifts.max() < 1e-3, pair.name


async def test_groups_depend_on_their_numbers_alone(work: CalibrationTask, weights: Weights, monkeypatch) -> None:
    whole = await measure(work, SAME, weights)
    rest = await measure(work, SAME, weights, groups=2, first=4)
    assert [group.lengths for group in rest] == [group.lengths for group in whole[4:]]
    monkeypatch.setattr(pairs, "_CHUNK_ROLLOUTS", 1)
    assert [group.lengths for group in await measure(work, SAME, weights)] == [group.lengths for group in whole]
    other = await measure(replace(work, seed=1), SAME, weights)
    assert [group.lengths for group in other] != [group.lengths for group in whole]


def test_a_large_vocabulary_makes_small_chunks(work: CalibrationTask, policy: Policy) -> None:
    assert work.chunk == 128
    large = replace(policy, config=dict(policy.config) | {"vocab_size": 151_936})
    assert replace(work, policy=large, params=replace(work.params, max_tokens=100_000)).chunk == 1


# Pairs with vLLM on one side or both


def test_pairs_with_vllm_vary_what_each_engine_can_vary() -> None:
    vllm = VllmVariant(Path("python"), Path("directory"), "0.32.0")
    both, generating, checking = (
        {pair.name: pair for pair in run_pairs(one, other)} for one, other in ((vllm, vllm), (vllm, BASE), (BASE, vllm))
    )
    assert list(both) == ["same", "small-batches"]
    assert list(generating) == ["same", "small-batches", "alone-checked", "eager-checked"]
    assert generating["small-batches"].generating == VllmVariant(
        Path("python"), Path("directory"), "0.32.0", sequences=FEW_SEQUENCES
    )
    assert {"alone-generated", "eager-generated", "two-threads"} < set(checking)
    assert {pair.checking for pair in checking.values()} == {vllm}
    assert str(vllm) == "vllm 0.32.0 float32 on cpu, 256 sequences"
