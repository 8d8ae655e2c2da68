"""A policy that an engine of this machine serves: a checkpoint, or the newest version of a run, verified."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import click
import torch
import trio

from grailnode.cli.options import PolicyOptions
from grailnode.config import Config, without_file
from grailnode.engine import models
from grailnode.engine.compute import open_engine
from grailnode.engine.policy import Policy, load_weights
from grailnode.node.bodies import fetch_task, make_compute
from grailnode.node.node_makers import make_spectator
from grailnode.observe.chain_check import fetch_first_head
from grailnode.run.joining import open_config_to_read
from grailnode.ui.formatting import clean
from roles.authority_updates import refresh_authority
from roles.node.identity import Node
from roles.policy.assignment import Task
from roles.policy.follower import Follower
from roles.policy.serving import serve
from roles.ports import Engine


def _no_report(event: str, **fields: object) -> None:
    """Take an event of the engine; a command prints none."""


@dataclass(frozen=True)
class ServedPolicy:
    """An engine that serves a policy."""

    source: str  # the directory, or the run's name
    policy: Policy  # without weights
    engine: Engine
    node: Node | None = None
    task: Task | None = None  # the run's; None for a checkpoint
    follower: Follower | None = None  # of the run's versions; None for a checkpoint

    @property
    def label(self) -> str:
        """What is served, for people."""
        if self.follower is None or self.follower.newest is None:
            return self.source
        newest = self.follower.newest
        return f"{clean(self.source)} version {newest.version} (weights {newest.digest.hex()[:16]})"

    async def update(self) -> None:
        """Serve the run's newest version; a checkpoint stays as it is."""
        if self.node is None or self.follower is None:
            return
        await refresh_authority(self.node)
        await self.follower.refresh()
        assert self.follower.chain.head is not None  # or the refresh would have raised
        await serve(self.node, self.engine, await self.follower.rebuild(self.follower.chain.head.version))


@asynccontextmanager
async def open_policy(**options: Unpack[PolicyOptions]) -> AsyncIterator[ServedPolicy]:
    """Serve the checkpoint of a directory, or a run's newest version, with the engine that the options set."""
    directory, run, overrides = options["directory"], options["run"], options["overrides"]
    if (directory is None) == (run is None):
        raise click.UsageError("give a DIRECTORY with a checkpoint, or --run FILE-or-URL")
    with tempfile.TemporaryDirectory(prefix="grailnode-policy-") as files:
        if directory is not None:
            opened = _serve_checkpoint(directory, without_file({}, overrides, Path()), Path(files))
        elif run is not None:
            config = open_config_to_read(run, overrides, trust=options["trust"])
            opened = serve_newest(make_spectator(config), config, Path(files))
        async with opened as served:
            yield served


@asynccontextmanager
async def _serve_checkpoint(directory: Path, config: Config, files: Path) -> AsyncIterator[ServedPolicy]:
    torch.set_num_threads(config.engine.threads)
    policy = Policy.load(directory)
    device = torch.device(config.engine.device if config.engine.kind == "torch" else "cpu")
    compute = make_compute(config, models.build(policy, device), policy, files)
    async with open_engine(compute, trio.to_thread.run_sync, _no_report) as engine:
        await engine.stage(0, load_weights(directory))
        await engine.commit()
        yield ServedPolicy(str(directory), policy, engine)


@asynccontextmanager
async def serve_newest(node: Node, config: Config, files: Path) -> AsyncIterator[ServedPolicy]:
    """Serve a run's newest version; the run's files go to a directory."""
    torch.set_num_threads(config.engine.threads)
    await refresh_authority(node)
    await fetch_first_head(node)
    task, compute = await fetch_task(node, config, files)
    follower = await Follower(node, allow_expired=True).open()
    async with open_engine(compute, node.run_sync, _no_report) as engine:
        served = ServedPolicy(node.run.name, Policy.load(files / "model"), engine, node, task, follower)
        await served.update()
        yield served
