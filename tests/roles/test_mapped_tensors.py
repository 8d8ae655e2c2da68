"""Tensors in files: a follower that has its weights there has the same weights, and a full disk is an error."""

import gc
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from grailnode.engine.compute import Compute
from grailnode.engine.models import build
from grailnode.engine.policy import PACKAGED_POLICY, Policy
from grailnode.engine.vllm.vllm_settings import VllmSettings
from grailnode.node import wiring
from grailnode.node.mapped_tensors import mapped_tensors
from protocol.digest import digest_weights
from roles.ports import StoreError
from tests.support.attacked_nodes.follower import AttackedFollower
from tests.support.builders.chains import make_node
from tests.support.faults.full_disk import free_space

TENSORS = {
    "a": torch.zeros(300, 7, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 3, dtype=torch.float32),
    "number": torch.zeros((), dtype=torch.float32),
    "z": torch.zeros(5, dtype=torch.uint8),
}


def mapped_files(directory: Path) -> int:
    """Return how many files below a directory this process has mapped."""
    return sum(str(directory) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_tensors_have_the_form_of_others_and_memory_of_their_own(tmp_path: Path) -> None:
    tensors = mapped_tensors(tmp_path, TENSORS)
    assert {name: (t.dtype, t.shape) for name, t in tensors.items()} == {
        name: (t.dtype, t.shape) for name, t in TENSORS.items()
    }
    for number, tensor in enumerate(tensors.values()):
        tensor.fill_(number + 1)
    assert {name: set(tensor.reshape(-1).tolist()) for name, tensor in tensors.items()} == {
        "a": {1.0},
        "empty": set(),
        "number": {3.0},
        "z": {4},
    }
    assert all(tensor.is_contiguous() and tensor.data_ptr() % 8 == 0 for tensor in tensors.values())


def test_a_file_has_no_name_and_is_gone_with_its_last_tensor(tmp_path: Path) -> None:
    tensors = mapped_tensors(tmp_path / "versions", TENSORS)
    assert list((tmp_path / "versions").iterdir()) == []
    assert mapped_files(tmp_path) == 1
    last = tensors.pop("z")
    del tensors
    assert mapped_files(tmp_path) == 1
    assert last.tolist() == [0] * 5
    del last
    assert mapped_files(tmp_path) == 0


def test_tensors_without_elements_need_no_file(tmp_path: Path) -> None:
    tensors = mapped_tensors(tmp_path, {"empty": TENSORS["empty"]})
    assert tensors["empty"].shape == (0, 3)
    assert mapped_tensors(tmp_path, {}) == {}


@pytest.mark.parametrize("is_full", [True, False], ids=["no room", "no directory"])
def test_a_disk_that_takes_no_file_is_an_error_of_the_store(tmp_path: Path, is_full: bool) -> None:
    (tmp_path / "file").touch()
    directory = tmp_path if is_full else tmp_path / "file" / "versions"
    with free_space(16) if is_full else nullcontext(), pytest.raises(StoreError, match="no room for the weights"):
        mapped_tensors(directory, TENSORS)


async def test_a_follower_has_the_same_weights_in_files(tmp_path: Path) -> None:
    testbed = AttackedFollower()
    await testbed.publish(4)
    follower = await testbed.new_follower(new_tensors=partial(mapped_tensors, tmp_path))
    await follower.refresh()
    for version in (0, 1, 3):
        weights = await follower.rebuild(version)
        assert digest_weights(weights.weights) == digest_weights(testbed.chain.weights[version])
        del weights
        gc.collect()
        assert mapped_files(tmp_path) == 1, "an older version is still mapped"


async def test_a_follower_whose_disk_is_full_keeps_its_version(tmp_path: Path) -> None:
    testbed = AttackedFollower()
    await testbed.publish(2)
    follower = await testbed.new_follower(new_tensors=partial(mapped_tensors, tmp_path))
    await follower.refresh()
    await follower.rebuild(0)
    with free_space(16), pytest.raises(StoreError, match="no room for the weights"):
        await follower.rebuild(1)
    assert follower.newest is not None
    assert follower.newest.version == 0
    assert (await follower.rebuild(1)).version == 1


@pytest.mark.parametrize(("with_vllm", "files"), [(True, 1), (False, 0)], ids=["vllm", "torch"])
async def test_only_a_node_with_vllm_has_its_weights_in_files(tmp_path: Path, with_vllm: bool, files: int) -> None:
    testbed = AttackedFollower()
    await testbed.publish(2)
    vllm = VllmSettings() if with_vllm else None
    compute = Compute(build(Policy.load(PACKAGED_POLICY)), vllm=vllm, directory=tmp_path / "engine")
    node = make_node(testbed.run_id, testbed.run, testbed.store, testbed.state, testbed.log)
    follower = await wiring._open_follower(node, compute, wiring.MINER_VERSIONS)
    await follower.refresh()
    await follower.rebuild(1)
    gc.collect()
    assert mapped_files(tmp_path) == files
