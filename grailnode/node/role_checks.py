"""What a node of a role needs before any of its processes starts, as a list of checks in their order.

A node that cannot work says so in one line while its operator watches, and not after hours in which others waited for
it. time_check.py and disk_check.py have more of the checks.

Each check returns in a line what holds, or raises the failure that says what to change. The start of a node carries out
all of them up to the first failure; `grailnode doctor` goes on after one.
"""

import os
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch
import trio

from grailnode import UserError
from grailnode.beacon.relays import RelayBeacon, StoreBeacon
from grailnode.calibration import proof_file
from grailnode.config import Config
from grailnode.engine.compute import exact_refusal
from grailnode.engine.policy import Policy
from grailnode.environments import registry
from grailnode.node import admission_credential, disk_check, time_check
from grailnode.node.bodies import published_files
from grailnode.node.node_makers import make_canary, make_node, make_spectator, state_directory
from grailnode.node.process_launch import Role
from grailnode.node.run_model import check_device, check_run_settings, policy_directory
from grailnode.node.stores import Storage
from grailnode.node.telemetry import NodeTelemetry
from grailnode.run import key_files, requirements
from grailnode.track.tracker import check_tracker
from protocol import paths
from protocol.errors import AdmissionError
from protocol.proof import Arithmetic, arithmetic_of
from protocol.run import RunManifest
from roles.authority_updates import refresh_authority
from roles.node.identity import Node
from roles.ports import Beacon, Clock, LineReporter, NotFoundError, ObjectStore, StoreError

_PROBE_BYTES: Final = 32
_ATTEMPTS: Final = 3  # because storage that works may answer wrongly once
_PAUSE_SECONDS: Final = 1.0


class SkippedError(UserError):
    """A check that cannot be carried out here; the text says why."""


@dataclass(frozen=True)
class Check:
    """A check: what it is about, a function that returns what holds or raises what does not, and the check it needs."""

    name: str
    find: Callable[[], str]
    needs: str = ""


@dataclass(frozen=True)
class RoleChecks:
    """The checks of a node before its start."""

    config: Config
    role: Role
    name: str
    report: LineReporter
    waits: bool = True  # whether a wrong clock, or a beacon that does not answer, is waited for; else it is a failure

    @cached_property
    def node(self) -> Node:
        """The node, whose authority is refreshed by the check of storage."""
        if self.config.trainer.host:
            return make_spectator(self.config)
        return make_node(self.config, self.name, NodeTelemetry(self.name))

    @property
    def state(self) -> Path:
        return state_directory(self.config, self.name)

    @property
    def key_file(self) -> Path:
        return self.config.at(self.config.node.keys) / f"{self.name}{key_files.SUFFIX}"

    @property
    def trains(self) -> bool:
        return self.role in ("trainer", "worker")

    @property
    def takes_part(self) -> bool:
        """Whether it generates or judges: it is a miner, a validator, or a trainer with a canary."""
        return self.role in ("miner", "validator") or self.has_canary

    @property
    def has_canary(self) -> bool:
        return self.role == "trainer" and bool(self.config.trainer.canaries)

    def all(self) -> Sequence[Check]:
        """Return the checks in their order: what the machine has, storage, and what the run asks of the role."""
        engine, state = Check("engine", self._check_engine), Check("state", self._check_state)
        run, disk = Check("run", self._check_run), Check("disk", self._check_disk)
        if self.trains and self.config.trainer.host:
            return engine, state, run, disk  # ranks that follow those of another host
        return (
            engine,
            Check("key", self._check_key),
            state,
            run,
            disk,
            Check("storage", partial(trio.run, self._check_storage)),
            Check("permission", self._check_permission, needs="storage"),
            *([Check("trainer", self._check_trainer)] if self.role == "trainer" else []),
            *([Check("sandbox", self._check_sandbox)] if self.takes_part else []),
            Check("clock", partial(trio.run, self._compare_clocks)),  # before admissions, which expire
            *(
                [Check("admission", partial(trio.run, self._check_admission))]
                if self.role == "miner" or self.has_canary
                else []
            ),
        )

    def _check_engine(self) -> str:
        if self.config.store.kind == "https":
            raise UserError(
                f'store.kind: a {self.role} writes, and "https" only reads; `grailnode init DIR --bucket NAME` shows '
                "how to set a bucket up"
            )
        check_engine(self.config, self.role)
        engine = self.config.engine
        if self.trains and self.config.trainer.optimizer == "adamw-8bit" and not find_spec("bitsandbytes"):
            raise UserError("trainer.optimizer: adamw-8bit is not installed here; pip install 'grailnode[adamw-8bit]'")
        return f"{'torch' if self.trains else engine.kind} on {engine.device}, {engine.dtype}"

    def _check_key(self) -> str:
        is_new = not self.key_file.exists()
        if is_new and self.role != "miner":
            raise UserError(
                f"{self.key_file}: no such key; use --name for the node whose key is here, or restore its key"
            )
        public = key_files.read_or_create(self.key_file).public.hex()
        if is_new:
            self.report(f"{self.key_file}: made, a new key: {public}")
        return f"{self.key_file}: {public}"

    def _check_state(self) -> str:
        disk_check.check_disk(self.state, 0)
        return f"{self.state} can be written"

    def _check_run(self) -> str:
        run = self.node.run
        check_run_settings(self.config, run, trains=self.trains)
        if self.has_canary:
            check_run_settings(self.config, run, trains=False)  # a canary is a miner with the trainer's engine
        if self.role == "worker" and (refusal := run.sites_refusal):
            raise UserError(refusal)
        self._check_arithmetic(run)
        return f"{run.name}, {self.node.run_id.hex()}, admits how this node computes"

    def _check_arithmetic(self, run: RunManifest) -> None:
        """Refuse an engine that computes in an arithmetic that the run does not admit; a canary is a miner."""
        engine = self.config.engine
        if run.numerics == "exact":
            refusal = exact_refusal(engine.kind, engine.device, engine.dtype)
            if refusal and self.role in ("miner", "validator"):
                raise UserError(refusal)
            if engine.draft is not None:
                raise UserError("engine.draft: this run's numerics are exact, and its engines do not draft")
            return
        own, miners, validators = arithmetic_of(engine.kind, engine.dtype), run.proof.miners, run.proof.validators
        if (self.role == "miner" or self.has_canary) and own not in miners:
            raise UserError(_arithmetic_refusal("miners", own, miners, [(own, name) for name in validators]))
        if self.role == "validator" and own not in validators:
            raise UserError(_arithmetic_refusal("validators", own, validators, [(name, own) for name in miners]))

    def _check_disk(self) -> str:
        run = self.node.run
        if self.trains:
            needed_bytes = disk_check.trainer_bytes(Policy.load(policy_directory(self.config)), run.lora)
        else:
            needed_bytes = disk_check.follower_bytes(run, self.config, None)
        disk_check.check_disk(self.state, needed_bytes)
        return f"room for {-(-needed_bytes // (1 << 20))} MiB of state"

    async def _check_storage(self) -> str:
        node = self.node
        await refresh_authority(node)
        storage = Storage(self.config, NodeTelemetry(node.name))
        await check_space(node, storage.space(node.space) if node.space else None)
        await check_meeting_point(node)
        return "its own space can be written, listed, read by others and deleted, and the meeting point be seen"

    def _check_permission(self) -> str:
        authority, key = self.node.authority, self.node.key.public
        keys = {"trainer": authority.trainers, "worker": authority.workers, "validator": authority.validators}
        if self.role in keys and key not in keys[self.role]:
            granted = f", or let its founder run `grailnode keys grant {key.hex()} --role worker`"
            raise UserError(
                f"{self.key_file}: not a {self.role} key of this run; use --name for the node whose key is"
                + (granted if self.role == "worker" else "")
            )
        return f"the run lets this key be a {self.role}"

    def _check_trainer(self) -> str:
        config, run = self.config, self.node.run
        if config.trainer.track is not None:
            check_tracker(config.trainer.track)
        for spec in run.tasks:
            registry.check_code(spec)
        requirements.files_to_publish(run, *published_files(config))
        if self.node.authority.workers and config.trainer.outer is None and not run.sites_refusal:
            raise UserError(
                "trainer.outer: missing, and this run has workers, whose rounds its trainer closes "
                "(docs/guide/many-trainers.md)"
            )
        return "the files that it publishes are those of the run"

    def _check_sandbox(self) -> str:
        sandbox = requirements.open_sandbox(self.node.run)
        return "this run needs none" if sandbox is None else "bubblewrap works"

    async def _compare_clocks(self) -> str:
        node = make_node(self.config, self.name, NodeTelemetry(self.name))
        chain = node.run.beacon
        relays = Storage(self.config, NodeTelemetry(self.name)).relays(chain.chain_hash)

        def make_beacon(clock: Clock) -> Beacon:
            return RelayBeacon(relays, chain, clock) if relays else StoreBeacon(node.store, chain, clock)

        runs_beacon = self.role == "trainer" and bool(self.config.beacon.key) and not relays
        urls = [*time_check.clock_urls(self.config), *(relay.name for relay in relays)]
        sources = None if runs_beacon else make_beacon, time_check.date_reader(urls)
        if self.waits:
            log = self.config.at(self.config.node.logs) / f"{self.name}-start.jsonl"
            telemetry = NodeTelemetry(self.name, log, sys.stderr)
            await time_check.wait_for_time(node, *sources, telemetry)
        elif (problem := await time_check.find_problem(node, *sources)) is not None:
            raise UserError(problem[1])
        beacon = "this node runs the beacon" if runs_beacon else "the beacon answers"
        return f"this machine's clock is right, and {beacon}"

    async def _check_admission(self) -> str:
        node = self.node
        if self.has_canary:
            node = make_canary(self.config, self.name, NodeTelemetry(self.name))
            await refresh_authority(node)
        await check_admission(node, is_canary=self.has_canary)
        return f"admitted by {node.authority.admission.policy}"


def check_start(config: Config, role: Role, name: str, report: LineReporter) -> None:
    """Refuse what cannot work, before any process starts; create the key of a new miner."""
    for check in RoleChecks(config, role, name, report).all():
        check.find()


def check_engine(config: Config, role: Role) -> None:
    """Refuse an engine that cannot start; vLLM itself is checked when it has started."""
    engine = config.engine
    if engine.kind == "vllm" and role in ("miner", "validator"):
        python = config.vllm_python
        if python is not None and not python.is_file():
            raise UserError(f"engine.python: no interpreter at {python}; `grailnode engine install DIR` makes one")
        return
    check_device(engine.device, "engine.device")
    if role in ("trainer", "worker") and config.trainer.ranks > 1:
        check_ranks(engine.device, config.trainer.gpus)


def _arithmetic_refusal(
    who: str, own: Arithmetic, admitted: Sequence[Arithmetic], missing: Sequence[tuple[Arithmetic, Arithmetic]]
) -> str:
    """Return why a node cannot take part, and the commands that measure the missing pairs of arithmetics."""
    commands = " and ".join(f"`{proof_file.calibration_command(*pair)}`" for pair in missing)
    return (
        f"this run admits {who} in {', '.join(admitted)}, and this node would compute in {own}, for which it has no "
        f"thresholds: change engine.kind or engine.dtype, or join a run that admits it, whose founder measures it by "
        f"{commands}"
    )


async def check_space(node: Node, announced: ObjectStore | None) -> None:
    """Write, read back and delete an object of the node's own space, which strangers read at `announced`, if any do."""
    for remaining_attempts in reversed(range(_ATTEMPTS)):
        path = paths.probe(node.key.public, secrets.token_hex(8))
        try:
            await _check_probe(node, announced, path, secrets.token_bytes(_PROBE_BYTES))
        except UserError:
            with suppress(StoreError):
                await node.store.delete(path)
            if not remaining_attempts:
                raise
            await trio.sleep(_PAUSE_SECONDS)
        else:
            return


async def _check_probe(node: Node, announced: ObjectStore | None, path: str, content: bytes) -> None:
    try:
        await node.store.put(path, content)
        if await node.store.get(path, _PROBE_BYTES) != content:
            raise UserError(f"{path}: storage shows other bytes than this node wrote there")
    except StoreError as error:
        raise UserError(f"this node cannot write to its own space and read it: {error}") from error
    try:
        answer = content if announced is None else await announced.get(path, _PROBE_BYTES)
    except StoreError as error:
        missing = isinstance(error, NotFoundError)
        hint = "is it this bucket's public URL?" if missing else "may everybody read the bucket?"
        raise UserError(
            f"store.url {node.space}: others cannot read there what this node writes ({error}); {hint}"
        ) from error
    if answer != content:
        raise UserError(f"store.url {node.space}: shows other bytes than this node wrote; is it this bucket's URL?")
    try:
        await node.store.delete(path)
    except StoreError as error:
        raise UserError(f"this node cannot delete objects of its own space: {error}") from error


async def check_meeting_point(node: Node) -> None:
    """Raise UserError if the place cannot be listed where participants announce themselves."""
    try:
        async for _ in node.store.list(paths.participants()):
            break
    except StoreError as error:
        raise UserError(f"this node cannot see the run's participants at the meeting point: {error}") from error


async def check_admission(node: Node, *, is_canary: bool = False) -> None:
    """Raise UserError if validators will not consider this miner, by its invitation or the run's list of miners."""
    try:
        await admission_credential.check_admitted(node)
    except (AdmissionError, UserError) as error:
        policy, key = node.authority.admission.policy, node.key.public.hex()
        refusal = f"this run admits miners by {policy}, and does not admit "
        advice = f"its founder runs `grailnode admit {key}`"
        if is_canary:
            raise UserError(
                f"trainer.canaries: {refusal}the canary {key} ({error}); {advice}, or set trainer.canaries = 0"
            ) from error
        raise UserError(f"{refusal}this one ({error}); {advice}") from error


def check_ranks(device: str, count: int) -> None:
    """Raise UserError if a trainer's ranks have too few devices, or of a kind that ranks cannot share."""
    if device not in ("cpu", "cuda"):
        raise UserError(
            f'engine.device: with trainer.gpus = {count} it is "cuda" or "cpu", not {device!r}: each process takes a '
            "GPU of its own"
        )
    present = torch.cuda.device_count() if device == "cuda" else len(os.sched_getaffinity(0))
    if count > present:
        things = "GPUs" if device == "cuda" else "processor cores"
        raise UserError(f"trainer.gpus: {count}, but this machine has {present} {things}")
