"""What a miner or validator loads at its start is loaded beside the event loop, where it delays nobody else."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from grailnode.config import load
from grailnode.engine import models
from grailnode.engine.policy import Policy
from grailnode.node.bodies import fetch_task
from grailnode.node.wiring import make_task
from grailnode.run import creation
from tests.support.simulation.network import Network
from tests.support.simulation.network_runs import RULES


async def test_policy_model_and_task_are_loaded_in_other_threads(
    run_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, int] = {}

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            threads[name] = threading.get_ident()
            return function(*arguments, **options)

        return call

    network = Network(RULES)
    node = replace(network.node("miner-1"), run_sync=trio.to_thread.run_sync)
    files = creation.model_files(network.policy.directory)
    await creation.publish_files(network.store, node.authority.trainers[0], files)
    monkeypatch.setattr(Policy, "load", watched("policy", Policy.load))
    monkeypatch.setattr(models, "build", watched("model", models.build))
    monkeypatch.setattr("grailnode.node.wiring.make_task", watched("task", make_task))
    task, _ = await fetch_task(node, load(run_toml), tmp_path / "state", None, versions=1)
    assert task.run == node.run
    assert threads.keys() == {"policy", "model", "task"}
    assert threading.get_ident() not in threads.values()
