"""Honest ways to compute differ by rounding only."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grailnode.calibration.padding import Padded
from grailnode.calibration.variants import ALONE, Variant, run_pairs, select
from grailnode.engine.hf import TransformersModel
from grailnode.engine.models import build
from grailnode.engine.policy import Policy
from grailnode.engine.qwen3 import Qwen3, Qwen3Config
from protocol.digest import Weights
from roles.policy.causal_model import CausalModel
from tests.support.builders.policies import NOISE, PARAMS, random_weights, requests_of_many_lengths, write_policy

BASE = Variant()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("implementation", ["qwen3", "transformers"])
def test_padding_changes_rounding_only(policy: Policy, side, multiple, attention, implementation):
    plain = build(policy)
    weights = {name: tensor.to(torch.float32) for name, tensor in random_weights(plain).items()}
    model = replace(BASE, side=side, multiple=multiple, attention=attention, implementation=implementation).model(
        policy
    )
    ids = torch.randint(0, plain.vocabulary, (6, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(6, 9, dtype=torch.bool)
    mask[:2, :4] = False
    mask[4:, 6:] = False
    with torch.inference_mode():
        reference = plain.hidden(weights, ids, mask)
        torch.testing.assert_close(model.hidden(weights, ids, mask)[mask], reference[mask], rtol=0, atol=NOISE)


def test_pads_of_a_prefill_are_on_the_chosen_side(policy: Policy) -> None:
    class RecordingModel:
        """A model that records the mask of its last call."""

        def hidden(self, weights: object, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            self.mask = mask
            return ids[..., None].float()

    recording = RecordingModel()
    ids = torch.arange(10).reshape(2, 5)
    mask = torch.tensor([[False, True, True, False, True], [True] * 5])
    for side, first_row in (("left", [False] * 5 + [True] * 3), ("right", [True] * 3 + [False] * 5)):
        states = Padded(recording, side, multiple=4).hidden({}, ids, mask)  # type: ignore[arg-type]
        assert states[..., 0].tolist() == ids.tolist()  # the results are in the order of the inputs
        assert recording.mask[0].tolist() == first_row


async def test_generation_continues_after_the_pads(policy: Policy, weights: Weights) -> None:
    requests = requests_of_many_lengths(8)
    params = replace(PARAMS, max_tokens=5)
    plain = await (await BASE.serve(policy, weights)).generate(requests, params)
    for variant in (
        replace(BASE, multiple=16),
        replace(BASE, batch_tokens=ALONE),
        replace(BASE, attention="eager", multiple=16),
        replace(BASE, implementation="transformers", attention="eager", multiple=16),
        replace(BASE, threads=2),
    ):
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


def test_pairs_have_distinct_names_and_variants(policy: Policy) -> None:
    pairs = run_pairs(BASE, replace(BASE, dtype="bfloat16"), policy)
    for one, two in itertools.combinations(pairs, 2):
        assert one.name != two.name
        assert one[1:] != two[1:]
    assert all((pair.generating.dtype, pair.checking.dtype) == ("float32", "bfloat16") for pair in pairs)


def test_pairs_are_selected_by_name(policy: Policy) -> None:
    assert [pair.name for pair in select("left-padding,same", BASE, BASE, policy)] == ["left-padding", "same"]
    assert select("run", BASE, BASE, policy) == run_pairs(BASE, BASE, policy)
    with pytest.raises(ValueError, match=r"no pair 'sane'; there are: run, same,"):
        select("same,sane", BASE, BASE, policy)


def test_other_architectures_are_computed_by_transformers(tmp_path: Path) -> None:
    policy = write_policy(tmp_path, attention_bias=True)
    model: CausalModel = BASE.model(policy)
    assert isinstance(model, TransformersModel)
    assert "transformers" not in {pair.name for pair in run_pairs(BASE, BASE, policy)}
