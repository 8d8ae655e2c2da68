"""Training loops of others: the programs of examples/ against a real network and on two ranks, a loop that is killed,
and a program that follows its versions.
"""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint

from grailnode import UserError
from grailnode.engine.policy import PACKAGED_POLICY, load_weights
from grailnode.library import follow, follow_async, open_trainer, open_trainer_async
from grailnode.store.state.state_store import StateStore
from protocol.digest import digest_weights
from roles.trainer.spool import INBOX
from tests.support.builders.verified_batches import put_batch
from tests.support.processes.command_line import fail, succeed
from tests.support.processes.network_of_processes import RULES, NetworkOfProcesses
from tests.support.processes.programs import ENVIRONMENT, PATIENCE, ROOT, eventually
from tests.support.processes.stepwise_trainer import make_run, trainer_state

pytestmark = pytest.mark.slow

NO_TRL = "GRAILNODE_TRL_PYTHON names no interpreter with TRL; `pip install . 'trl==1.16.*'` makes one"
CPU_ONLY = {"CUDA_VISIBLE_DEVICES": ""}
# windows of 8 seconds: with shorter ones, miner and validator would work most of the time for groups nobody takes
NETWORK_RULES = RULES.in_rounds(4 * RULES.rounds)


def run_example(*command: str) -> None:
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=ENVIRONMENT | CPU_ONLY | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_trl_learns_from_the_groups_of_a_network_and_goes_on_from_its_checkpoint(
    network: NetworkOfProcesses, tmp_path: Path
) -> None:
    python, run = os.environ.get("GRAILNODE_TRL_PYTHON", ""), str(network.workspace.config)
    if not Path(python).is_file():
        pytest.skip(NO_TRL)
    network.start("validator", "validator")
    network.start("miner", "miner-1")
    checkpoints = tmp_path / "checkpoints"
    for steps in (1, 2):
        run_example(python, "examples/trl_grpo.py", run, str(checkpoints), "--steps", str(steps), "--groups", "2")
    history: list[dict[str, Any]] = json.loads((checkpoints / "checkpoint-2/trainer_state.json").read_text())[
        "log_history"
    ]
    digests = [digest for line in history for digest in line.get("groups", ())]
    assert len(digests) == len(set(digests)) == 2 * 2
    figures = [line for line in history if "reward" in line]
    assert [line["step"] for line in figures] == [1, 2]
    # the verified log-probabilities are those of TRL's own model up to rounding: else ratios would be out of bounds
    assert all(line["clip_ratio/region_mean"] < 0.05 for line in figures)
    version = next(iter(follow(run)))
    assert (version.number, version.step) == (2, 2)
    weights = load_file(checkpoints / "checkpoint-2/model.safetensors")
    assert version.digest == digest_weights({name: weights[name].bfloat16() for name in version.weights})


def test_ranks_of_fsdp_publish_what_their_checkpoint_has(tmp_path: Path) -> None:
    directory, checkpoints = make_run(tmp_path / "run"), tmp_path / "checkpoints"
    run = str(directory / "run.toml")
    state = trainer_state(directory)
    for number in range(1, 5):
        trio.run(put_batch, state, number)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for steps in ("1", "2"):
        run_example(*launcher, "examples/fsdp2.py", run, str(checkpoints), steps)
    version = next(iter(follow(run)))
    assert (version.number, version.step) == (2, 2)
    weights: dict[str, Any] = {"weights": {name: tensor.float() for name, tensor in version.weights.items()}}
    load_checkpoint(weights, checkpoint_id=checkpoints / "00000002")
    assert version.digest == digest_weights({name: tensor.bfloat16() for name, tensor in weights["weights"].items()})
    assert version.digest != digest_weights(load_weights(PACKAGED_POLICY))
    trio.run(check_empty, state)


async def check_empty(state: StateStore) -> None:
    """Check that all groups are acknowledged."""
    assert not [item.path async for item in state.list(INBOX)]


# grailnode as a library


LOOP = textwrap.dedent(
    """
    import json, os, sys
    from pathlib import Path
    from grailnode.engine.policy import PACKAGED_POLICY, load_weights
    from grailnode.library import open_trainer

    journal, weights = Path(sys.argv[2]), load_weights(PACKAGED_POLICY)
    lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    done = {digest for line in lines for digest in line["groups"]}

    def write(line):  # a checkpoint of this loop
        with journal.open("a") as file:
            file.write(json.dumps(line) + "\\n")
            file.flush()
            os.fsync(file.fileno())

    with open_trainer(sys.argv[1]) as trainer:
        trainer.acknowledge([bytes.fromhex(digest) for digest in done])
        while True:
            groups = trainer.groups()
            write({"groups": [group.digest.hex() for group in groups]})
            done |= {group.digest.hex() for group in groups}
            trainer.acknowledge(groups)
            version = trainer.publish({name: tensor + len(done) for name, tensor in weights.items()}, step=len(done))
            write({"groups": [], "version": version})
    """
)


def test_a_loop_that_is_killed_trains_on_every_group_once_and_loses_no_version(tmp_path: Path) -> None:
    run, rng = make_run(tmp_path / "run"), random.Random(1)
    script, journal, log = tmp_path / "loop.py", tmp_path / "journal", tmp_path / "log"
    script.write_text(LOOP)
    state = trainer_state(run)

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []

    def digests() -> list[str]:
        return [digest for line in lines() for digest in line["groups"]]

    numbers, delivered, sessions = count(1), set[str](), list[int]()

    def deliver() -> None:
        batch = trio.run(put_batch, state, next(numbers))
        delivered.update(group.digest.hex() for group in batch.groups)

    def run_loop(until: Callable[[], bool]) -> None:
        """Start the loop, and kill it when something has happened."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, str(script), str(run / "run.toml"), str(journal)],
                stdout=output,
                stderr=output,
                env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )
        sessions.append(process.pid)
        try:
            eventually(until, "groups are learned from")
            trio.run(trio.sleep, rng.uniform(0, 0.5))
        finally:
            process.kill()
            process.wait()

    for _ in range(10):
        before = len(digests())
        deliver()
        deliver()
        run_loop(lambda before=before: len(digests()) > before)  # type: ignore[misc]
    run_loop(lambda: set(digests()) == delivered)
    assert sorted(digests()) == sorted(delivered), log.read_text()
    with open_trainer(run / "run.toml") as trainer:
        trainer.wait_for_uploads()
        versions = [line["version"] for line in lines() if "version" in line]
        assert versions == sorted(set(versions))  # each has a number of its own
        assert trainer.version >= versions[-1]
        assert next(iter(follow(str(run / "run.toml")))).number == trainer.version
    for session in sessions:  # the trainer's node outlives the loop that started it
        with suppress(ProcessLookupError):
            os.killpg(session, signal.SIGKILL)


def test_what_a_careless_program_does_is_refused_in_one_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run") / "run.toml"
    weights = load_weights(PACKAGED_POLICY)
    name = next(iter(weights))
    refusals: list[tuple[Callable[[Any], object], str]] = [
        (lambda trainer: trainer.publish(None, step=1), "a NoneType; publish a state dict"),
        (lambda trainer: trainer.publish(weights | {name: [1.0]}, step=1), f"{name} is a list"),
        (lambda trainer: trainer.publish(weights | {name: weights[name].int()}, step=1), f"{name} has dtype"),
        (lambda trainer: trainer.publish(weights | {name: weights[name].to("meta")}, step=1), "has no values"),
        (lambda trainer: trainer.publish(weights, step=1.5), "step 1.5: not a whole number"),
        (lambda trainer: trainer.groups(2, 1), "not 0 <= min_count <= max_count"),
        (lambda trainer: trainer.publish(weights | {name: weights[name] / 0}, step=1), f"{name} .* not finite"),
        (lambda trainer: trainer.acknowledge([bytes(31)]), "a group, or a list of groups"),
    ]
    with open_trainer(run) as trainer:
        for call, text in refusals:
            with pytest.raises(UserError, match=text):
                call(trainer)
        trainer.acknowledge([])
        with ThreadPoolExecutor(1) as other:
            waiting = other.submit(trainer.groups)
            eventually(trainer._calling.locked, "the other thread waits")
            with pytest.raises(UserError, match="another thread is in a call"):
                trainer.groups(0)
            trio.run(put_batch, trainer_state(run.parent), 1)
            assert waiting.result()
        child = os.fork()
        if not child:
            with suppress(UserError):
                trainer.publish(weights, step=1)
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(UserError, match="was closed"):
        trainer.publish(weights, step=1)


async def test_a_program_in_trio_waits_without_blocking_and_may_cancel(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    state = await trio.to_thread.run_sync(trainer_state, run)
    weights = load_weights(PACKAGED_POLICY)
    async with open_trainer_async(run / "run.toml") as trainer:
        with trio.move_on_after(0.5) as waiting:  # other tasks run meanwhile, such as this clock
            await trainer.groups()
        assert waiting.cancelled_caught
        batch = await put_batch(state, 1)
        groups = await trainer.groups(min_count=len(batch.groups))
        assert {group.digest for group in groups} == {group.digest for group in batch.groups}
        await trainer.acknowledge(groups)
        with pytest.raises(UserError, match="weights: step -1"):
            await trainer.publish(weights, step=-1)
        assert await trainer.publish(weights, step=3) == trainer.version == 1
        await trainer.wait_for_uploads()
        async for version in follow_async(str(run / "run.toml")):
            assert (version.number, version.step) == (1, 3)
            break


def test_a_checkpoint_is_published_and_followed_by_command_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    line = succeed("publish", str(PACKAGED_POLICY), "--run", str(run / "run.toml"), "--step", "7")
    assert line.endswith("version 1 is in storage\n")
    folder = tmp_path / "weights"
    line = succeed("follow", str(run / "run.toml"), str(folder), "--once")
    assert f"version 1, step 7, weights {digest_weights(load_weights(PACKAGED_POLICY)).hex()}" in line
    assert [file.name for file in folder.iterdir()] == ["0000000001.safetensors"]
    (tmp_path / "empty").mkdir()
    error = fail("publish", str(tmp_path / "empty"), "--run", str(run / "run.toml"), "--step", "8")
    assert error.startswith("grailnode: ")
