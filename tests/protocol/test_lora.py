"""Adapters in a run manifest, and the tables of versions that a run of adapters allows."""

from typing import Any

import pytest
from pydantic import ValidationError

from protocol import limits
from protocol.chain.verifier import ChainVerifier
from protocol.errors import ChainError
from protocol.lora import LoraSpec
from protocol.objects import ObjectRef
from protocol.run import RunManifest
from tests.protocol.signed_chain import NOW, Trainer, chain
from tests.support.builders.samples import RUN_ID, digest, run_manifest

SHARD = ObjectRef(digest=digest("shard"), size=4096)
M = "base_model.model.model.layers.0.self_attn.q_proj"
DOWN, UP = (f"{M}.lora_A.weight", "BF16", (4, 32)), (f"{M}.lora_B.weight", "BF16", (16, 4))


def spec(**changes: Any) -> LoraSpec:
    fields: dict[str, Any] = {
        "rank": 4,
        "alpha": 8.0,
        "targets": ("q_proj", "v_proj"),
        "base": digest("base"),
        "shards": (SHARD,),
    }
    return LoraSpec(**(fields | changes))


def test_a_manifest_with_adapters_round_trips() -> None:
    manifest = run_manifest(lora=spec())
    assert RunManifest.from_bytes(manifest.to_bytes()) == manifest
    assert spec().scale == 2.0


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 0},
        {"rank": -1},
        {"rank": limits.MAX_LORA_RANK + 1},
        {"alpha": 0.0},
        {"alpha": float("nan")},
        {"alpha": float("inf")},
        {"alpha": 1e9},
        {"targets": ()},
        {"targets": ("v_proj", "q_proj")},
        {"targets": ("q_proj", "q_proj")},
        {"targets": ("q proj",)},
        {"targets": (".",)},
        {"targets": ("",)},
        {"targets": tuple(f"m{number:03d}" for number in range(limits.MAX_LORA_TARGETS + 1))},
        {"base": b"short"},
        {"shards": ()},
        {"shards": (SHARD,) * (limits.MAX_ANCHOR_SHARDS + 1)},
    ],
    ids=str,
)
def test_invalid_adapters(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        spec(**changes)


def test_a_target_is_the_end_of_a_modules_name() -> None:
    lora = spec(targets=("mlp.up_proj", "q_proj"))
    assert lora.is_target("model.layers.0.self_attn.q_proj")
    assert lora.is_target("q_proj")
    assert lora.is_target("model.layers.3.mlp.up_proj")
    assert not lora.is_target("model.layers.3.other.up_proj")
    assert not lora.is_target("model.layers.0.self_attn.my_q_proj")


def test_a_table_of_adapters_is_accepted() -> None:
    spec().check_table((DOWN, UP), "here")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((("model.norm.weight", "BF16", (32,)),), "none of the run's adapters"),
        ((DOWN, UP, ("model.layers.0.self_attn.q_proj.weight", "BF16", (16, 32))), "none of the run's adapters"),
        ((DOWN, (M + ".lora_B.bias", "BF16", (16, 4))), "half an adapter|none of the run's"),
        (((M.replace("q_proj", "k_proj") + ".lora_A.weight", "BF16", (4, 32)),), "none of the run's adapters"),
        (((M.removeprefix("base_model.model.") + ".lora_A.weight", "BF16", (4, 32)),), "none of the run's adapters"),
        ((DOWN,), "half an adapter"),
        ((UP,), "half an adapter"),
        (((DOWN[0], "BF16", (5, 32)), UP), "not an adapter of the run's rank"),
        ((DOWN, (UP[0], "BF16", (4, 16))), "not an adapter of the run's rank"),
        ((DOWN, (UP[0], "F32", (16, 4))), "not in BF16"),
        ((DOWN, (UP[0], "BF16", (16, 4, 1))), "not an adapter of the run's rank"),
        (((DOWN[0], "BF16", (4, 1 << 38)), UP), "larger than the base allows"),
        (
            (
                DOWN,
                (UP[0], "BF16", (900, 4)),
            ),
            "larger than the base allows",
        ),
    ],
    ids=str,
)
def test_other_tables_are_refused(tensors: Any, message: str) -> None:
    with pytest.raises(ChainError, match=message):
        spec(shards=(ObjectRef(digest=digest("shard"), size=2048),)).check_table(tensors, "here")


def test_a_version_of_other_tensors_is_refused_by_its_manifest() -> None:
    """Nothing of the version has been fetched then."""
    trainer = Trainer().add(tensors=(DOWN, UP)).add(tensors=(DOWN, UP))
    whole = chain(2)
    node = ChainVerifier(RUN_ID, run_manifest(lora=spec()))
    node.accept_head(trainer.head(), NOW)
    for version in range(2):
        node.accept_manifest(version, trainer.data(version))
    other = ChainVerifier(RUN_ID, run_manifest(lora=spec()))
    other.accept_head(whole.head(), NOW)
    with pytest.raises(ChainError, match="none of the run's adapters"):
        other.accept_manifest(0, whole.data(0))
