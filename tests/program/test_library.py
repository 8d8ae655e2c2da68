"""What a program hands to its node as a version, and what it hears while it waits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from grailnode import UserError
from grailnode.config import Config, TrainerSection
from grailnode.library import AsyncTrainer
from grailnode.store.memory import MemoryStore
from protocol.digest import Weights
from roles.trainer.spool import SnapshotName
from roles.trainer.training_spool import TrainingSpool
from tests.support.builders.chains import equal
from tests.support.builders.families import Family, write_family
from tests.support.builders.policies import inline
from tests.support.builders.recipes import demo_rules
from tests.support.builders.snapshots import get_snapshot
from tests.support.simulation.network import Network


@pytest.fixture(scope="module", params=["llama", "qwen3_moe", "mixtral", "gpt_neox"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return write_family(tmp_path_factory.mktemp("policy"), request.param)


async def published(family: Family, weights: Weights | Path) -> Weights:
    """Return the next version of a run of the family's policy, as its node finds it."""
    node = replace(Network(demo_rules()).node("trainer"), state=MemoryStore(), run_sync=inline)
    config = Config(trainer=TrainerSection(policy=str(family.policy.directory)))
    assert await AsyncTrainer(node, TrainingSpool(node, 1), config).publish(weights, step=3) == 0
    return await get_snapshot(node.state, SnapshotName(0, 3))


async def test_a_state_dict_and_its_checkpoint_are_the_same_version(family: Family) -> None:
    """Also of experts, which transformers fuses, and of an output projection that has another name in the files."""
    version = await published(family, family.reference.state_dict())
    assert equal(version, {name: tensor.bfloat16() for name, tensor in family.weights.items()})
    assert equal(version, await published(family, family.policy.directory))


async def test_other_names_and_shapes_are_refused_by_name(family: Family) -> None:
    state = family.reference.state_dict()
    for name in list(family.weights)[:1] + [name for name in state if name.endswith("layers.0.mlp.experts.down_proj")]:
        tensor = state.get(name, next(iter(state.values())))
        others = {key: value for key, value in state.items() if value is not tensor}
        for weights, text in (
            (state | {f"x.{name}": tensor}, f"weights: x.{name}: unknown to the model; the names are those of"),
            (state | {name: torch.cat([tensor, tensor])}, f"weights: {name}: shape .* where the model has"),
            (others, "missing from the weights"),
        ):
            with pytest.raises(UserError, match=text):
                await published(family, weights)
