"""grailnode as a library: a training loop of somebody else that is killed, and a program that follows its versions."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import trio

from grailnode import UserError
from grailnode.engine.policy import PACKAGED_POLICY, load_weights
from grailnode.library import follow, follow_async, open_trainer, open_trainer_async
from protocol.digest import digest_weights
from tests.support.builders.verified_batches import put_batch
from tests.support.processes.command_line import fail, succeed
from tests.support.processes.programs import ENVIRONMENT, ROOT, eventually
from tests.support.processes.stepwise_trainer import make_run, trainer_state

pytestmark = pytest.mark.slow

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
        while True:
            groups = trainer.groups()
            new = [group for group in groups if group.digest.hex() not in done]
            write({"groups": [group.digest.hex() for group in new]})
            done |= {group.digest.hex() for group in new}
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
