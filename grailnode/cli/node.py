"""What `grailnode trainer`, `miner`, `validator` and `demo` do, and what their configuration may not be."""

import io
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click
import torch
import trio
from rich.console import Console

from grailnode.config import Config, ConfigError, load, without_file
from grailnode.demo.demo_network import DemoSettings
from grailnode.demo.demo_network import run_demo as run_demo_network
from grailnode.node import admission_proof
from grailnode.node.processes import Kind, Launch, data_file, main, make_canary, make_node
from grailnode.node.supervisor import ProcessSpec, Supervisor, run_until_interrupted
from grailnode.node.telemetry import NodeTelemetry
from grailnode.run import joining, key_files, requirements, workspace
from grailnode.run.creation import Choices
from grailnode.ui.terminal import render_summary
from protocol.errors import AdmissionError
from roles.authority_updates import refresh_authority
from roles.node.identity import Node

DEFAULT_WINDOWS = 72

_PROCESSES: dict[str, tuple[Kind, ...]] = {
    "trainer": ("training", "upload", "download"),
    "miner": ("miner",),
    "validator": ("validator",),
}


def open_config(run: str, overrides: tuple[str, ...] = (), *, trust: bool = False) -> Config:
    """The configuration of a run.toml, or of a run manifest's URL; the manifest is a file in it.

    Raises:
        ConfigError, StoreError, ProtocolError: it cannot be used; the manifest is not to be had.
    """
    if joining.is_url(run):
        base, run_id = joining.named_run(run)
        values: dict[str, Any] = {"run": {"manifest": run, "id": run_id}, "beacon": {"key": ""}}
        if base:
            place = {"kind": "https", "url": base}
            values["store"] = {**place, "meeting": place}
        config = without_file(values, overrides, Path.cwd())
    else:
        config = load(Path(run), overrides)
    config, told = joining.localize(config, trust=trust)
    if told:
        _tell(told)
    return config


def run_role(role: str, run: str, name: str | None, overrides: tuple[str, ...], *, trust: bool) -> None:
    """Run a node until Ctrl-C."""
    config = open_config(run, overrides, trust=trust)
    name = name or ("miner-1" if role == "miner" else role)
    kinds = _PROCESSES[role]
    if role == "trainer" and config.beacon.key:
        kinds = ("beacon", *kinds)
    if role == "trainer" and config.trainer.canaries:
        kinds = (*kinds, "canary")
    assert set(kinds) <= set(get_args(Kind))
    check_start(config, role, name)
    specs = [ProcessSpec(f"{name}/{kind}", main, (Launch(config, kind, name),)) for kind in kinds]
    supervisor = Supervisor(_tell)
    run_until_interrupted(partial(supervisor.keep, specs))
    _tell(f"{name}: stopped")


def _tell(line: str) -> None:
    """A line on standard error; a closed terminal or a full disk behind it must not stop a node.

    What the stream still holds of such a line would fail once more with the start of every process, which empties it
    before.
    """
    try:
        click.echo(line, err=True)
    except (OSError, ValueError):
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), errors="backslashreplace", write_through=True)


_node_name = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,32}")


def check_name(name: str) -> None:
    """Refuse what cannot be a node's name."""
    if not _node_name.fullmatch(name):
        raise click.UsageError(
            f"--name {name}: up to 32 letters, digits, '_', '.' and '-', the first no '.', "
            "which announcements and file names carry"
        )


def check_start(config: Config, role: str, name: str) -> None:
    """Refuse what cannot work before any process starts."""
    if config.store.kind == "https":
        raise ConfigError(
            f'store.kind: a {role} writes, and "https" only reads; `grailnode init DIR --bucket NAME` shows how to set a '
            "bucket up"
        )
    check_name(name)
    path = config.at(config.node.keys) / f"{name}{key_files.SUFFIX}"
    if not path.exists():
        if role != "miner":
            raise key_files.KeyFileError(
                f"{path}: no such key; use --name for the node whose key is here, or restore its key"
            )
        _tell(f"{path}: made, a new key: {key_files.read_or_create(path).public.hex()}")
    _check_device(config.engine.device)
    node = make_node(config, name, NodeTelemetry(name))
    trio.run(refresh_authority, node)
    allowed = {"trainer": node.authority.trainers, "validator": node.authority.validators}
    if role in allowed and node.key.public not in allowed[role]:
        raise key_files.KeyFileError(f"{path}: not a {role} key of this run; use --name for the node whose key is")
    if role == "trainer" and config.trainer.canaries:
        _check_canary(make_canary(config, name, NodeTelemetry(name)))
    if role == "trainer":
        requirements.needed(node.run.environment)
        requirements.published(node.run, data_file(config))
    if role != "trainer" or config.trainer.canaries:
        requirements.open_sandbox(node.run)


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # a wrong name; a torch without it
        raise ConfigError(f"engine.device: torch cannot use {name!r} here ({str(error).splitlines()[0]})") from None


def _check_canary(node: Node) -> None:
    """Refuse to start with a canary that nobody takes notice of."""
    trio.run(refresh_authority, node)
    try:
        trio.run(admission_proof.check_admitted, node)
    except (AdmissionError, key_files.KeyFileError) as error:
        public = node.key.public.hex()
        raise ConfigError(
            f"trainer.canaries: this run admits by {node.authority.admission.policy}, and its canary {public} is not "
            f"admitted ({error}); run `grailnode admit {public}`, or set trainer.canaries = 0"
        ) from None


def run_demo(windows: int | None, seed: int, out: Path, keep: bool, command: str) -> None:
    """The demo, and its summary."""
    if (out / "network").exists():
        raise workspace.WorkspaceError(f"{out / 'network'}: a run was kept there; choose another --out, or remove it")
    settings = DemoSettings(windows or DEFAULT_WINDOWS, seed, out, keep, command)
    report = run_until_interrupted(partial(run_demo_network, settings, Choices(), workspace.Pace()))
    if report is None:
        raise click.exceptions.Abort
    console = Console()
    console.print(render_summary(report))
    console.print(f"report: {out / 'report.html'}  {out / 'report.json'}")
