"""Runs of adapters and of quantized weights in a whole network: followers, cheats, restarts, exports, and the base of
adapters.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from safetensors.torch import load_file

from grailnode.cli.actions.model_export import export_version
from grailnode.config import Config
from grailnode.engine import models
from grailnode.engine.compute import Compute
from grailnode.engine.lora_model import LoraModel, merged_weights, read_adapters
from grailnode.engine.policy import PolicyError, load_weights
from grailnode.node.bodies import join_run
from grailnode.node.run_model import follower_model
from grailnode.observe.chain_check import verify_chain
from grailnode.run.base_files import fetch_base, lora_spec, publish_base, start_lora
from grailnode.run.creation import model_files, publish_files
from grailnode.run.rules import Rules
from protocol import limits, paths
from protocol.digest import Weights, digest_weights
from protocol.judging.verdict import Reason
from protocol.objects import ObjectRef
from protocol.quantization import SCALE, dequantize, quantize
from roles.miner.produce import HonestProducer
from roles.policy.follower import Follower
from roles.policy.verified_weights import VerifiedWeights
from roles.ports import StoreError
from roles.trainer.spool import newest_weights, weights_folder
from roles.trainer.tensor_shards import read_tensors
from tests.support.builders.policies import engine_of
from tests.support.builders.recipes import demo_rules
from tests.support.simulation.network import Network, key
from tests.support.simulation.network_runs import newest_published, run_nodes, verdicts
from tests.support.simulation.recording_store import RecordingStore
from tests.support.simulation.virtual_clock import simulate

RULES = demo_rules(groups=4, group_size=4)
RANK, ALPHA, TARGETS = 4, 8.0, ("q_proj", "v_proj", "up_proj", "down_proj")
LAST_WINDOW = 13
OTHER_WEIGHTS = {Reason.SKETCH, Reason.SAMPLING, Reason.WINDOW}


class LoraNetwork(Network):
    """A network whose run trains low-rank adapters of the small policy."""

    def __init__(self, rules: Rules, learning_rate: float = 2e-3) -> None:
        super().__init__(rules)
        start = start_lora(self.policy, RANK, ALPHA, TARGETS)
        assert start is not None
        self.learning_rate = learning_rate
        self.model = LoraModel(models.build(self.policy, lora=start.spec), load_weights(self.policy.directory))
        self.weights = dict(start.adapters)
        self.compute = self.training_compute = Compute(self.model)
        genesis = digest_weights(start.adapters)
        self.amend(lora=start.spec, model=self.run.model.model_copy(update={"genesis": genesis}))


async def rebuild_newest(network: Network, name: str) -> VerifiedWeights:
    """Return the newest version, as a new follower has it."""
    follower = await Follower(network.node(name)).open()
    await follower.refresh()
    assert follower.chain.head is not None
    return await follower.rebuild(follower.chain.head.version)


@pytest.fixture(scope="module", params=[pytest.param(kind, marks=pytest.mark.slow) for kind in ("lora", "fp8")])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what was in a network of adapters or of quantized weights, by name."""
    return simulate(play, request.param, tmp_path_factory.mktemp(request.param))


async def play(kind: str, directory: Path) -> dict[str, Any]:
    """Play a network whose trainer is killed once, with an honest miner and two that compute with other weights: those
    of an old version, and the bare base of adapters, or the policy before it was quantized. Return what was in it, by
    name.
    """
    values: dict[str, Any] = {"kind": kind, "directory": directory}
    if kind == "lora":
        network: Network = LoraNetwork(RULES, learning_rate=4e-3)
        bare = {name: torch.zeros_like(tensor) for name, tensor in network.weights.items()}
    else:
        network = Network(RULES.changed(precision=kind))
        bare = network.weights
    engine = await engine_of(network.compute.model, bare)
    async with run_nodes(network, miners=1) as nursery:
        nursery.start_soon(network.run_miner, "bare", 2, lambda task, _: HonestProducer(task, engine))
        await network.until_window(4)
    values["old version"] = await rebuild_newest(network, "early")
    old_engine = await engine_of(network.compute.model, dict(values["old version"].weights))
    async with run_nodes(network, miners=1) as nursery:
        nursery.start_soon(network.run_miner, "bare", 2, lambda task, _: HonestProducer(task, engine))
        nursery.start_soon(network.run_miner, "old", 2, lambda task, _: HonestProducer(task, old_engine))
        await network.until_window(LAST_WINDOW + 3)
    windows = range(LAST_WINDOW)
    values["network"] = network
    values["verdicts"] = {name: await verdicts(network, name, windows) for name in ("miner-1", "bare", "old")}
    values["checked"] = await verify_chain(network.node("checker"), lambda line: None)
    values["newest"] = await rebuild_newest(network, "late")
    state = network.states["trainer"]
    stored = await newest_weights(state)
    assert stored is not None
    values["stored"] = stored[0], await read_tensors(state, weights_folder(stored[0]), stored[1])
    await publish_files(network.store, key("trainer").public, model_files(network.policy.directory))
    if network.run.lora is not None:
        await publish_base(network.node("trainer"), network.run.lora, load_weights(network.policy.directory))
        await export_version(network.node("observer"), directory / "merged", merge=True)
    await export_version(network.node("observer"), directory / "exported")
    return values


def test_followers_have_the_trainers_weights_bit_for_bit(played: dict[str, Any]) -> None:
    network, newest, (version, stored) = played["network"], played["newest"], played["stored"]
    assert newest.version == version == played["checked"].version >= 3
    assert newest.digest == played["checked"].digest == digest_weights(newest.weights) != network.run.model.genesis
    assert digest_weights(stored) == newest.digest
    if played["kind"] == "lora":
        assert newest.weights.keys() == network.model.shapes.keys()
    else:
        assert digest_weights(quantize(network.weights, played["kind"])) == network.run.model.genesis
        assert sum(name.endswith(SCALE) for name in newest.weights) == 7


def test_the_chain_goes_on_after_a_restart(played: dict[str, Any]) -> None:
    assert played["network"].events("trainer/training", "resumed")
    assert newest_published(played["network"]) >= 3


def test_honest_work_is_accepted_and_trained_on(played: dict[str, Any]) -> None:
    judged = played["verdicts"]["miner-1"]
    assert len(judged) > 5
    assert {judgement.reason for verdict in judged.values() for judgement in verdict.judgements} == {""}
    steps = played["network"].events("trainer/training", "step")
    fresh = [step["clipped"] for step in steps if step["staleness"] == 0]
    assert fresh and max(fresh) == 0, "the trainer computes the log-probabilities that the validator found"


@pytest.mark.parametrize("name", ["bare", "old"])
def test_work_with_other_weights_is_refused(played: dict[str, Any], name: str) -> None:
    """In version 0 the base alone is the policy of a run of adapters. A policy that is not quantized is refused from
    its first window.
    """
    judged = played["verdicts"][name]
    first_version = 0 if name == "bare" else played["old version"].version
    last = [judged[window] for window in sorted(judged)[-3:]]
    assert len(last) == 3
    assert all(verdict.version > first_version for verdict in last)
    if name == "bare" and played["kind"] != "lora":
        last = list(judged.values())
    for verdict in last:
        assert {judgement.reason for judgement in verdict.judgements} <= OTHER_WEIGHTS


def test_an_exported_version_is_adapters_or_a_whole_model(played: dict[str, Any]) -> None:
    newest, directory = played["newest"], played["directory"]
    if played["kind"] == "lora":
        check_exported_adapters(played)
        return
    exported: Weights = load_file(directory / "exported" / "model.safetensors")
    assert digest_weights(exported) == digest_weights(dequantize(newest.weights))
    assert digest_weights(load_weights(directory / "exported")) == digest_weights(exported)
    again = dequantize(quantize(exported, played["kind"]))
    assert digest_weights(again) == digest_weights(exported)
    card = (directory / "exported" / "README.md").read_text()
    assert f"{played['kind']}, written as BF16" in card
    assert newest.digest.hex() in card


def check_exported_adapters(played: dict[str, Any]) -> None:
    network, newest, directory = played["network"], played["newest"], played["directory"]
    assert digest_weights(read_adapters(directory / "exported")) == newest.digest
    assert not (directory / "exported" / "config.json").exists()
    base = load_weights(network.policy.directory)
    expected = merged_weights(base, newest.weights, ALPHA / RANK)
    assert digest_weights(load_file(directory / "merged" / "model.safetensors")) == digest_weights(expected)
    changed = {name for name, tensor in expected.items() if not torch.equal(tensor, base[name])}
    assert {name.removesuffix(".weight").rpartition(".")[2] for name in changed} == set(TARGETS)
    files = {path.name for path in (directory / "merged").iterdir()}
    assert files == {"README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


class Base:
    """A network of adapters whose base has several files in storage, and a directory into which they are fetched."""

    def __init__(self, directory: Path) -> None:
        self.network, self.directory = LoraNetwork(RULES), directory
        self.weights = load_weights(self.network.policy.directory)
        self.lora = lora_spec(self.weights, RANK, ALPHA, TARGETS, shard_bytes=4096)
        self.shapes = self.network.model._model.shapes
        self.key = key("trainer").public

    async def publish(self) -> None:
        await publish_base(self.network.node("trainer"), self.lora, self.weights, 4096)

    async def fetch(self, lora: Any = None) -> Weights:
        node = self.network.node("miner-1")
        return await fetch_base(node, lora or self.lora, [self.key], self.directory, self.shapes)

    def path(self, number: int) -> str:
        return paths.file(self.key, self.lora.shards[number].digest)


async def test_a_base_is_fetched_once_and_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    base = Base(tmp_path)
    assert len(base.lora.shards) > 3
    await base.publish()
    third = await base.network.store.get(base.path(2), 1 << 20)
    await base.network.store.delete(base.path(2))
    with pytest.raises(StoreError):
        await base.fetch()
    assert len(base.network.events("miner-1", "base-file-fetched")) == 2
    await base.network.store.put(base.path(2), third)
    assert digest_weights(await base.fetch()) == digest_weights(base.weights)
    assert len(base.network.events("miner-1", "base-file-fetched")) == len(base.lora.shards)
    (base.directory / "00001.safetensors").write_bytes(b"damaged")
    (base.directory / ".00002.safetensors.0123456789abcdef").write_bytes(b"left when the process was killed")
    await base.fetch()
    assert len(list(base.directory.iterdir())) == len(base.lora.shards)
    numbers = [event["file"] for event in base.network.events("miner-1", "base-file-fetched")]
    assert numbers == [*range(1, len(base.lora.shards) + 1), 2]


async def test_a_trainer_uploads_only_the_files_that_are_missing(tmp_path: Path) -> None:
    base = Base(tmp_path)
    base.network.store = store = RecordingStore()
    await base.publish()
    await store.put(base.path(0), b"")  # another size
    store.puts.clear()
    await base.publish()
    assert [put.path for put in store.puts] == [base.path(0)]


async def test_another_base_is_refused(tmp_path: Path) -> None:
    base = Base(tmp_path)
    name = min(base.weights)
    others = base.weights | {name: base.weights[name] + 1}
    with pytest.raises(PolicyError, match="this run's adapters are for the base"):
        await publish_base(base.network.node("trainer"), base.lora, others, 4096)
    with pytest.raises(PolicyError, match="file 0 of the run's base cannot be written again"):
        await publish_base(base.network.node("trainer"), base.lora, base.weights, 1 << 20)
    await base.publish()
    with pytest.raises(PolicyError, match="this run's adapters are for the base"):
        await base.fetch(base.lora.model_copy(update={"base": bytes(32)}))
    large = ObjectRef(digest=bytes(32), size=1 << 36)
    with pytest.raises(PolicyError, match=f"a base of {1 << 36} bytes, where its model has"):
        await base.fetch(base.lora.model_copy(update={"shards": (large,)}))
    with pytest.raises(PolicyError, match="bytes of BF16 weights"):
        await base.fetch(base.lora.model_copy(update={"shards": base.lora.shards[1:]}))
    await base.network.store.put(base.path(1), bytes(base.lora.shards[1].size))
    (base.directory / "00001.safetensors").unlink()
    with pytest.raises(StoreError, match="not the file that the run names"):
        await base.fetch()


async def test_files_that_are_larger_or_more_than_a_base_needs_are_refused_before_one_is_fetched(
    tmp_path: Path,
) -> None:
    base = Base(tmp_path)
    await base.publish()
    many = [ObjectRef(digest=bytes(32), size=limits.MAX_SAFETENSORS_HEADER_BYTES) for _ in base.weights]
    with pytest.raises(PolicyError, match=r"in \d+ files, where its model has \d+ tensors"):
        await base.fetch(base.lora.model_copy(update={"shards": (*base.lora.shards, *many)}))
    base.shapes = {f"layer{number}.weight": (1 << 14, 1 << 14) for number in range(4)}
    large = ObjectRef(digest=bytes(32), size=(1 << 31) + 1024)
    with pytest.raises(PolicyError, match="has a file of 2147484672 bytes"):
        await base.fetch(base.lora.model_copy(update={"shards": (large,)}))
    assert not base.network.events("miner-1", "base-file-fetched")


@pytest.mark.parametrize(("kind", "message"), [("dtype", "has dtype"), ("name", "has shape")])
async def test_files_with_tensors_of_another_dtype_or_name_are_refused(kind: str, message: str, tmp_path: Path) -> None:
    base = Base(tmp_path)
    others = dict(base.weights)
    if kind == "dtype":
        others = {name: tensor.to(torch.float32) for name, tensor in others.items()}
    else:
        name = min(others)
        others[name + ".other"] = others.pop(name)
    lora = lora_spec(others, RANK, ALPHA, TARGETS)
    await publish_base(base.network.node("trainer"), lora, others)
    with pytest.raises(PolicyError, match=message):
        await base.fetch(lora)


async def test_nodes_compute_with_the_base_that_the_trainer_published(tmp_path: Path) -> None:
    base = Base(tmp_path)
    network = base.network
    assert network.run.lora is not None
    await publish_base(network.node("trainer"), network.run.lora, base.weights)
    config = Config()
    model = await follower_model(network.node("miner-1"), config, network.policy, base.directory, "cpu")
    ids = torch.tensor([[5, 6, 7]])
    weights = {name: tensor.to(torch.float32) for name, tensor in network.weights.items()}
    states = [one.hidden(weights, ids, torch.ones_like(ids, dtype=torch.bool)) for one in (model, network.model)]
    assert torch.equal(states[0], states[1])
    vllm = config.model_copy(update={"engine": config.engine.model_copy(update={"kind": "vllm"})})
    other = await follower_model(network.node("miner-2"), vllm, network.policy, base.directory, "cpu")
    assert isinstance(other, LoraModel)
    assert digest_weights(other.base) == digest_weights(base.weights)


async def test_a_node_does_not_download_a_damaged_file_again_and_again(tmp_path: Path) -> None:
    """The founder may pay for each download."""
    base = Base(tmp_path)
    network, reads = base.network, 0
    await publish_files(network.store, base.key, model_files(network.policy.directory))
    assert network.run.lora is not None
    await publish_base(network.node("trainer"), network.run.lora, base.weights)
    shard_path = paths.file(base.key, network.run.lora.shards[0].digest)
    await network.store.put(shard_path, bytes(network.run.lora.shards[0].size))
    get = network.store.get

    async def count_reads(path: str, max_bytes: int, *, offset: int = 0, size: int | None = None) -> bytes:
        nonlocal reads
        reads += path == shard_path
        return await get(path, max_bytes, offset=offset, size=size)

    network.store.get = count_reads  # type: ignore[method-assign]
    config = Config()
    config = config.model_copy(update={"node": config.node.model_copy(update={"state": str(tmp_path)})})
    with trio.move_on_after(600.0):
        await join_run(network.node("miner-1"), config, "miner-1")
    assert 10 < reads < 40
