"""A quantized run in a whole network: followers, honest work, a miner with other weights, a restart, an export."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from grailnode.cli.actions.model_export import export_version
from grailnode.engine.policy import load_weights
from grailnode.observe.chain_check import verify_chain
from grailnode.run.creation import Choices, model_files, publish_files
from protocol.digest import Weights, digest_weights
from protocol.judging.verdict import Reason
from protocol.quantization import SCALE, Precision, dequantize, quantize
from roles.policy.follower import Follower
from roles.trainer.spool import newest_weights, weights_folder
from roles.trainer.tensor_shards import read_tensors
from tests.support.simulation.frozen_engine import FrozenEngine, FrozenProducer
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import run_nodes, verdicts
from tests.support.simulation.virtual_clock import simulate

CHOICES = Choices(groups=4, group_size=4)
LAST_WINDOW = 7
OTHER_WEIGHTS = {Reason.SKETCH, Reason.SAMPLING, Reason.WINDOW}


@pytest.fixture(scope="module", params=["fp8", "int8"])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Play a network whose trainer is killed once, with an honest miner and one that computes with the policy before it
    was quantized; return what was in it, by name.
    """
    precision: Precision = request.param
    directory = tmp_path_factory.mktemp(precision)
    values: dict[str, Any] = {"precision": precision, "exported": directory / "exported"}

    async def scenario() -> None:
        network = values["network"] = Network(replace(CHOICES, precision=precision))
        engine = FrozenEngine(network.compute.model, network.weights)
        async with run_nodes(network, miners=1) as nursery:
            nursery.start_soon(network.run_miner, "unquantized", 2, lambda task, _: FrozenProducer(task, engine))
            await network.until_window(4)
        async with run_nodes(network, miners=1):
            await network.until_window(LAST_WINDOW + 3)
        windows = range(LAST_WINDOW)
        values["verdicts"] = {name: await verdicts(network, name, windows) for name in ("miner-1", "unquantized")}
        values["checked"] = await verify_chain(network.node("checker"), lambda line: None)
        follower = await Follower.open(network.node("late"))
        await follower.refresh()
        values["newest"] = await follower.rebuild(values["checked"].version)
        state = network.states["trainer"]
        stored = await newest_weights(state)
        assert stored is not None
        values["stored"] = await read_tensors(state, weights_folder(stored[0]), stored[1]), stored[0]
        await publish_files(network.store, key("trainer").public, model_files(network.policy.directory))
        await export_version(network.node("observer"), values["exported"])

    simulate(scenario)
    return values


@pytest.mark.slow
def test_followers_have_the_trainers_codes_bit_for_bit(played: dict[str, Any]) -> None:
    network, newest, (stored, version) = played["network"], played["newest"], played["stored"]
    genesis = quantize(network.weights, played["precision"])
    assert digest_weights(genesis) == network.run.model.genesis
    assert newest.version == played["checked"].version >= 3
    assert newest.digest == played["checked"].digest == digest_weights(newest.weights) != network.run.model.genesis
    assert version == newest.version
    assert digest_weights(stored) == newest.digest
    assert sum(name.endswith(SCALE) for name in newest.weights) == 7


@pytest.mark.slow
def test_the_chain_goes_on_after_a_restart(played: dict[str, Any]) -> None:
    network = played["network"]
    assert network.events("trainer/training", "resumed")
    versions = [event["version"] for event in network.events("trainer/upload", "published")]
    assert sorted(set(versions)) == list(range(versions[-1] + 1))


@pytest.mark.slow
def test_honest_work_is_accepted_and_trained_on(played: dict[str, Any]) -> None:
    judged = played["verdicts"]["miner-1"]
    assert len(judged) > 3
    assert {judgement.reason for verdict in judged.values() for judgement in verdict.judgements} == {""}
    steps = played["network"].events("trainer/training", "step")
    fresh = [step["clipped"] for step in steps if step["staleness"] == 0]
    assert fresh and max(fresh) == 0, "the trainer computes the log-probabilities that the validator found"


@pytest.mark.slow
def test_the_policy_before_quantization_is_refused(played: dict[str, Any]) -> None:
    judged = played["verdicts"]["unquantized"]
    assert judged
    for verdict in judged.values():
        assert {judgement.reason for judgement in verdict.judgements} <= OTHER_WEIGHTS


@pytest.mark.slow
def test_an_exported_version_has_the_values_in_bf16(played: dict[str, Any]) -> None:
    directory, newest = played["exported"], played["newest"]
    exported: Weights = load_file(directory / "model.safetensors")
    assert digest_weights(exported) == digest_weights(dequantize(newest.weights))
    assert digest_weights(load_weights(directory)) == digest_weights(exported)
    again = dequantize(quantize(exported, played["precision"]))
    assert digest_weights(again) == digest_weights(exported)
    card = Path(directory / "README.md").read_text()
    assert f"{played['precision']}, written as BF16" in card
    assert newest.digest.hex() in card
