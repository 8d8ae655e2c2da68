"""What a program hands to its node as a version, and what it hears while it waits."""

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import trio
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from grailnode import UserError
from grailnode.config import Config, TrainerSection
from grailnode.engine.policy import PACKAGED_POLICY, load_weights
from grailnode.library import AsyncTrainer, Trainer, follow, follow_async, followed_run
from grailnode.library import progress as progress_of_calls
from grailnode.store.memory import MemoryStore
from protocol.digest import Weights
from roles.node.identity import Node
from roles.policy.follower import Follower
from roles.ports import StateError
from roles.trainer.spool import SnapshotName
from roles.trainer.training_spool import TrainingSpool
from tests.support.attacked_nodes.follower import AttackedFollower
from tests.support.builders.chains import equal
from tests.support.builders.families import Family, write_family
from tests.support.builders.policies import inline
from tests.support.builders.recipes import demo_rules
from tests.support.builders.snapshots import get_snapshot
from tests.support.builders.verified_batches import GROUPS, put_batch
from tests.support.processes.programs import PATIENCE
from tests.support.simulation.network import BEGIN, Network


@pytest.fixture(scope="module", params=["llama", "qwen3_moe", "mixtral", "gpt_neox"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return write_family(tmp_path_factory.mktemp("policy"), request.param)


def new_node() -> Node:
    return replace(Network(demo_rules()).node("trainer"), state=MemoryStore(), run_sync=inline)


async def published(family: Family, weights: Weights | Path) -> Weights:
    """Return the next version of a run of the family's policy, as its node finds it."""
    node = new_node()
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


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda name, tensor: {3: tensor}, "weights: 3 is an int, not a tensor's name; publish"),
        (lambda name, tensor: {(name,): tensor}, "weights: .* is a tuple, not a tensor's name; publish"),
        (lambda name, tensor: {"layers": {name: tensor}}, "weights: layers is a dict; publish tensors of torch"),
        (lambda name, tensor: {name: tensor.to("meta")}, "{} has no values, .* meta; publish .* loaded"),
        (lambda name, tensor: {name: tensor.float().to_sparse()}, "{} is sparse or nested; publish"),
        (lambda name, tensor: {name: torch.nested.nested_tensor([tensor.float()])}, "{} is sparse or nested; publish"),
    ],
)
async def test_what_is_no_state_dict_is_refused_in_one_line(
    change: Callable[[str, torch.Tensor], dict[object, object]], text: str
) -> None:
    weights: Any = load_weights(PACKAGED_POLICY)
    name = next(iter(weights))
    trainer = AsyncTrainer(new_node(), TrainingSpool(new_node(), 1), Config())
    with pytest.raises(UserError, match=text.format(re.escape(name))) as refusal:
        await trainer.publish(weights | change(name, weights[name]), step=1)
    assert "\n" not in str(refusal.value)


async def test_fewer_than_no_groups_are_refused() -> None:
    with pytest.raises(UserError, match="min_count -1 and max_count None"):
        await AsyncTrainer(new_node(), TrainingSpool(new_node(), 1), Config()).groups(-1)


class StoppedClock:
    def now(self) -> float:
        return BEGIN

    async def sleep_until(self, moment: float) -> None:
        await trio.sleep_forever()


@pytest.mark.parametrize("begun", [True, False])
def test_a_forked_child_follows_anew_and_hears_that_it_must(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def publish() -> Node:
        testbed = AttackedFollower()
        await testbed.publish(2)
        return replace(testbed.node, clock=StoppedClock())

    node = trio.run(publish)
    monkeypatch.setattr(followed_run, "open_config_to_read", lambda run: run)
    monkeypatch.setattr(followed_run, "make_spectator", lambda config: node)
    versions = follow("run")
    if begun:
        assert next(versions).number == 1
    child = os.fork()
    if not child:
        signal.alarm(20)  # it must not wait for ever
        try:
            with pytest.raises(UserError, match="another process") if begun else nullcontext():
                next(versions)
            os._exit(next(follow("run")).number)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


async def test_whoever_ends_a_program_does_not_wait_for_a_run_that_cannot_be_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(followed_run, "open_config_to_read", lambda run: ended.wait(20))  # as a server that hangs
    begin = trio.current_time()
    with trio.move_on_after(0.1):
        await anext(follow_async("run"))
    ended.set()
    assert trio.current_time() - begin < 10


@pytest.mark.parametrize("error", [MemoryError("none left"), StateError("trust", "damaged")])
async def test_what_fails_while_a_program_follows_a_run_is_raised_by_itself(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(follower: Follower) -> None:
        raise error

    node = AttackedFollower().node
    monkeypatch.setattr(followed_run, "open_config_to_read", lambda run: run)
    monkeypatch.setattr(followed_run, "make_spectator", lambda config: node)
    monkeypatch.setattr(Follower, "refresh", fail)
    with pytest.raises(type(error)):
        await anext(follow_async("run"))


async def test_long_calls_say_what_they_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported every 30 s; here without a pause."""

    async def run_slowly(function: Callable[..., Any], *arguments: Any) -> Any:
        await trio.sleep(0.1)
        return function(*arguments)

    lines, node = list[str](), replace(new_node(), run_sync=run_slowly)
    monkeypatch.setattr(progress_of_calls, "INTERVAL_SECONDS", 0.01)
    trainer = AsyncTrainer(node, TrainingSpool(node, 1), Config(), lines.append)

    async def check(text: str, call: Callable[[], Awaitable[object]]) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            with trio.fail_after(PATIENCE):
                while not any(re.fullmatch(rf"{text} after \d+ s", line) for line in lines):
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()

    await put_batch(node.state, 1)
    await check(f"waiting for groups: {GROUPS} of 16", partial(trainer.groups, 16))
    await check("step 7: writing 0.0 of 0.0 GB", partial(trainer.publish, load_weights(PACKAGED_POLICY), step=7))
    assert trainer.version == 0
    await check("waiting for the upload of 1 versions", trainer.wait_for_uploads)


def in_group(rank: int, meeting: Path) -> "dist.ProcessGroup":
    """Return the group of two ranks, of which this process is one."""
    address, seconds = f"file://{meeting}", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=seconds)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def failure_to_open(rank: int, meeting: Path) -> str:
    """Return what a rank hears where the state of the first one is damaged."""

    def fail() -> AsyncTrainer:
        raise StateError("chain/epoch", "damaged")

    ranks = in_group(rank, meeting)
    with pytest.raises(UserError if rank else StateError) as error_info:
        Trainer(fail, ranks)
    return str(error_info.value)


def failure_to_gather(rank: int, meeting: Path) -> str:
    """Return what a rank hears where the first one has no memory for the first of two tensors that are divided."""

    def fail(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no memory")

    ranks, opened = in_group(rank, meeting), SimpleNamespace(run=None, policy=None, version=0)
    trainer = Trainer(lambda: cast(AsyncTrainer, opened), ranks)
    mesh = init_device_mesh("cpu", (2,))
    weights = {name: distribute_tensor(torch.ones(4), mesh) for name in ("one", "other")}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError if rank else RuntimeError) as error_info:
        if rank == 0:
            patch.setattr(torch.Tensor, "cpu", fail)
        trainer.publish(weights, step=1)
    return str(error_info.value)


FAILURES = [(failure_to_open, "chain/epoch: damaged"), (failure_to_gather, "RuntimeError('no memory')")]


@pytest.mark.parametrize(("failure", "said"), FAILURES)
def test_no_rank_waits_for_a_first_one_that_has_failed(
    failure: Callable[[int, Path], str], said: str, tmp_path: Path
) -> None:
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as processes:
        first, other = processes.map(failure, range(2), [tmp_path / "meeting"] * 2)
    assert first.startswith((said, "no memory"))
    assert other.startswith(f"the first rank has failed: {said}")
