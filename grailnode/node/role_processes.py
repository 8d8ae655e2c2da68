"""The processes of a trainer, a worker, a miner or a validator."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from grailnode.config import Config
from grailnode.node.process_launch import Kind, Launch, Seat
from grailnode.node.processes import log_of, main, main_of_rank, main_of_upload
from grailnode.node.role_checks import Role
from grailnode.node.supervisor import ProcessSpec, Supervisor, run_until_interrupted
from grailnode.node.telemetry import NodeTelemetry
from roles.ports import LineReporter

PROCESSES: Final[Mapping[Role, tuple[Kind, ...]]] = {
    "trainer": ("training", "upload", "download"),
    "worker": ("site",),
    "miner": ("miner",),
    "validator": ("validator",),
}
"""The processes that every node of a role has; those of a trainer with sites are in `process_kinds`."""


def run_role(config: Config, role: Role, name: str, report: LineReporter) -> None:
    launches = [Launch(config, kind, name) for kind in process_kinds(config, role)]
    run_until_interrupted(partial(keep_processes, launches, report))
    report(f"{name}: stopped")


async def keep_processes(launches: Sequence[Launch], report: LineReporter) -> None:
    """Keep the processes of a node running. That a signal has ended one is an event in its log, and an alarm."""
    specs = [make_spec(launch) for launch in launches]
    telemetry = {
        spec.name: NodeTelemetry(launch.process, log_of(launch, launch.process), alarm_url=launch.config.node.alarm_url)
        for spec, launch in zip(specs, launches, strict=True)
    }
    try:
        await Supervisor(report, lambda name, how: telemetry[name].event("failed", error=how)).keep(specs)
    finally:
        for process in telemetry.values():
            process.close()


def make_spec(launch: Launch) -> ProcessSpec:
    """Return what the supervisor keeps running: one process, or this host's ranks of a trainer or site."""
    title, trainer = f"{launch.name}/{launch.kind}", launch.config.trainer
    if launch.kind in ("training", "site") and trainer.ranks > 1:
        first, meeting = trainer.host * trainer.gpus, trainer.hosts.meeting if trainer.hosts else ""
        ranks = range(first, first + trainer.gpus)
        seats = [Seat(rank, trainer.ranks, meeting, trainer.gpus) for rank in ranks]
        return ProcessSpec(title, main_of_rank, (launch,), seats)
    return ProcessSpec(title, main_of_upload if launch.kind == "upload" and trainer.host else main, (launch,))


def process_kinds(config: Config, role: Role) -> tuple[Kind, ...]:
    """Return the kinds of processes of a node; a host that follows host 0 has no others."""
    if config.trainer.host:
        return ("site",) if role == "worker" else ("training", "upload")
    has_sites = role == "trainer" and config.trainer.outer is not None
    kinds: tuple[Kind, ...] = ("coordinator",) if has_sites else PROCESSES[role]
    if role == "trainer" and config.trainer.external:
        kinds = tuple(kind for kind in kinds if kind != "training")
    if role == "trainer" and config.beacon.key:
        kinds = ("beacon", *kinds)
    if role == "trainer" and config.trainer.canaries:
        kinds = (*kinds, "canary")
    if role == "trainer" and config.trainer.track is not None:
        kinds = (*kinds, "tracking")
    return kinds
