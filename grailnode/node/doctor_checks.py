"""`grailnode doctor`: whether this machine can run a node, and whether a run would accept its work, a line for each.

The checks of a node's start come from role_checks.py. Those of this module need longer, or are no reason to refuse a
start: memory, GPU, what storage shows of this node, and honest rollouts judged by the run (own_rollouts.py).
"""

import importlib.metadata
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import httpx
import torch
import trio
from packaging.requirements import Requirement

from grailnode import UserError
from grailnode.beacon.relays import RELAYS
from grailnode.config import Config
from grailnode.engine.policy import Policy
from grailnode.engine.vllm.verify_requests import NoAnswerError, request_verification
from grailnode.node.disk_check import free_memory, parameters
from grailnode.node.node_makers import engine_directory
from grailnode.node.own_rollouts import judge_own_rollouts
from grailnode.node.process_launch import Role
from grailnode.node.role_checks import Check, RoleChecks, SkippedError
from grailnode.node.run_model import policy_directory
from grailnode.node.state_locks import is_locked
from grailnode.node.time_check import TOLERANCE_SECONDS, date_reader
from grailnode.node.user_errors import explain
from grailnode.sandbox import BubblewrapSandbox
from grailnode.store.state.state_store import REMAKEABLE
from protocol import paths
from protocol.identity.participant import Announcement
from protocol.rollout.sampling import triton_fault
from roles.authority_updates import AUTHORITY
from roles.node.identity import Node
from roles.ports import LineReporter, NotFoundError, ObjectStore
from roles.records import fetch_record

Outcome = Literal["ok", "warning", "failed", "skipped"]

_BYTES: Final = {"trainer": 18.2 + 2.7, "worker": 18.2, "miner": 4.1, "validator": 4.1}
"""Bytes of memory a parameter of all processes of a role, as `python -m bench.sizes 75M` measures them."""
_VLLM_BYTES: Final = 6.0
"""The same of a miner or validator beside vLLM, with vLLM's own weights in bfloat16 (docs/benchmarks/engines.md)."""
_SMALL_BYTES: Final = 600 << 20  # of the programs themselves, and of a batch
_PROBE_BYTES: Final = 32
_ATTEMPTS: Final = 2
_HTTP_SECONDS: Final = 10.0


class AdviceError(UserError):
    """Something that a node can live with; the text says what would be better."""


@dataclass(frozen=True)
class Finding:
    """What came of a check: in a failure's line, what to do."""

    check: str
    outcome: Outcome
    line: str


def examine(checks: Sequence[Check]) -> Iterator[Finding]:
    """Carry out checks one after another; what fails for the reason of an earlier one is skipped."""
    causes: dict[str, str] = {}
    for check in checks:
        if check.needs in causes.values():
            yield Finding(check.name, "skipped", f"waits for what `{check.needs}` says")
            continue
        try:
            finding = Finding(check.name, "ok", check.find())
        except SkippedError as error:
            finding = Finding(check.name, "skipped", str(error))
        except AdviceError as error:
            finding = Finding(check.name, "warning", str(error))
        except Exception as error:
            line = explain(error)
            if line is None:
                raise
            finding = Finding(check.name, "failed", line)
            if line in causes:
                finding = Finding(check.name, "skipped", f"waits for what `{causes[line]}` says")
            causes.setdefault(line, check.name)
        yield finding


def machine_checks() -> Sequence[Check]:
    return (
        Check("python", _check_python),
        Check("gpu", _check_gpu),
        Check("sandbox", _check_bubblewrap),
        Check("clock", _check_clock),
    )


def node_checks(config: Config, role: Role, name: str, report: LineReporter) -> Sequence[Check]:
    """Return the checks of a node of a run: those of its start, and those that take longer.

    They try a request to storage again only once, because somebody waits for the answer.
    """
    store, meeting = config.store, config.store.meeting
    update: dict[str, Any] = {"attempts": min(store.attempts, _ATTEMPTS)}
    if meeting is not None:
        update["meeting"] = meeting.model_copy(update={"attempts": min(meeting.attempts, _ATTEMPTS)})
    config = config.model_copy(update={"store": store.model_copy(update=update)})
    checks = RoleChecks(config, role, name, report, waits=False)
    return (
        Check("python", _check_python),
        Check("gpu", _check_gpu),
        *checks.all(),
        Check("memory", partial(_check_memory, checks)),
        Check("browsers", partial(_check_browsers, checks)),
        Check("twin", partial(_check_twin, checks), needs="storage"),
        Check("engine's weights", partial(_check_engine_weights, checks)),
        Check("acceptance", partial(_check_acceptance, checks), needs="engine"),
    )


def _check_python() -> str:
    """Compare this interpreter's packages with what this program asks for."""
    for text in importlib.metadata.requires("grailnode") or ():
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(need.name)
            if not need.specifier.contains(version, prereleases=True):
                raise UserError(
                    f"{sys.executable} has {need.name} {version}, and grailnode needs {need.name}{need.specifier}: "
                    f"`{sys.executable} -m pip install '{need.name}{need.specifier}'`"
                )
    program = shutil.which("grailnode")
    # pipx and uv link the program to the environment's own, and the environment's interpreter links to another
    if program is not None and Path(program).resolve().parent != Path(sys.executable).parent.resolve():
        raise AdviceError(
            f"{program}, which a shell starts, belongs to another Python than this one ({sys.executable}): activate "
            "the environment that grailnode is installed in"
        )
    return f"{platform.python_version()} with torch {torch.__version__}"


def _check_gpu() -> str:
    """Name the GPU, and try whether Triton compiles for it."""
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is not None:
            raise AdviceError(
                f"nvidia-smi is here, and torch {torch.__version__} sees no GPU: install torch's build for CUDA, and "
                "a driver that it supports"
            )
        return "none; everything computes on the CPU"
    if fault := triton_fault(torch.device("cuda")):
        raise AdviceError(fault)
    free, total = torch.cuda.mem_get_info()
    name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
    return f"{count} x {name}, {free >> 30} of {total >> 30} GiB free, and Triton compiles for it"


def _check_bubblewrap() -> str:
    try:
        BubblewrapSandbox.open(f"{sys.version_info[0]}.{sys.version_info[1]}")
    except Exception as error:
        line = explain(error)
        if line is None:
            raise
        raise AdviceError(f"{line} (only runs whose answers are programs, and plug-ins, need it)") from error
    return "bubblewrap works"


def _check_clock() -> str:
    relay = next(iter(RELAYS.values()))[0]
    error = trio.run(date_reader([relay]))
    if error is None:
        raise SkippedError(f"{relay} does not answer, so nothing tells the time")
    if abs(error.seconds) > TOLERANCE_SECONDS:
        side = "ahead of" if error.seconds > 0 else "behind"
        raise UserError(f"this machine's clock is {abs(error.seconds):.0f} s {side} {relay}: set it right (NTP)")
    return f"agrees with {relay}"


def _check_memory(checks: RoleChecks) -> str:
    """Compare the memory that is free with what a role was measured to take for each parameter."""
    if _is_running(checks):
        raise SkippedError("the node of this name is running, and has its memory")
    run, config, role = checks.node.run, checks.config, checks.role
    count = parameters(_policy_at_hand(checks))
    served_by_vllm = config.engine.kind == "vllm" and role in ("miner", "validator")
    share = _VLLM_BYTES if served_by_vllm else _BYTES[role]
    if run.lora is not None and role in ("trainer", "worker"):
        share = 4.0  # of the base; the adapters are a few percent of it
    needed = _SMALL_BYTES + round(share * count)
    kind = f"a {role} in {config.engine.dtype}" + (" beside vLLM" if served_by_vllm else "")
    line = f"{kind} takes about {share:.3g} bytes for each of {count:,} parameters: {needed / 1e9:.1f} GB"
    free = free_memory()
    if free < needed:
        raise UserError(f"{line}, and {free / 1e9:.1f} GB are free: end other programs, or take a larger machine")
    return f"{line} of {free / 1e9:.1f} GB that are free"


def _policy_at_hand(checks: RoleChecks) -> Policy:
    """Return the run's policy, if its files are on this machine: a founder's, or those that a node has fetched."""
    for directory in (policy_directory(checks.config), checks.state / "model"):
        sizes = [(directory / file.name, file.size) for file in checks.node.run.model.files]
        if all(path.is_file() and path.stat().st_size == size for path, size in sizes):
            return Policy.load(directory)
    raise SkippedError("the run's model is not on this machine yet: give its directory with --set trainer.policy=DIR")


def _check_browsers(checks: RoleChecks) -> str:
    """Ask the announced URL whether a page in a browser may read it."""
    url = checks.node.space
    if not url:
        raise SkippedError("this node announces no URL of its own")
    try:
        response = httpx.get(f"{url}/", headers={"Origin": "https://example.org"}, timeout=_HTTP_SECONDS)
    except httpx.HTTPError as error:
        raise UserError(f"store.url {url}: does not answer ({error}); is it this bucket's public URL?") from error
    if "access-control-allow-origin" not in response.headers:
        raise AdviceError(
            f"store.url {url}: pages in browsers may not read it (no CORS header): apply bucket/cors.json, or cors.xml "
            "(docs/guide/founder.md)"
        )
    return f"pages in browsers may read {url}"


def _is_running(checks: RoleChecks) -> bool:
    return is_locked(checks.state, {"trainer": "upload", "worker": "site"}.get(checks.role, checks.role))


def _check_twin(checks: RoleChecks) -> str:
    """Look for another node with this key, and for objects of a state that this machine does not have."""
    if _is_running(checks):
        return "the node of this name is running on this machine"
    has_objects, has_state, expiry = trio.run(_traces, checks.node)
    if has_objects and not has_state and checks.role != "miner":
        raise UserError(
            f"storage has objects that this key wrote, and {checks.state} has no state: a {checks.role} must not begin "
            f"anew; restore its backup, run `grailnode repair --run RUN --name {checks.name}`, or take a new key and "
            "an empty bucket"
        )
    seconds = expiry - checks.node.clock.now()
    if seconds > 0:
        raise AdviceError(
            f"a node with this key has announced itself for another {seconds:.0f} s: if that was not this one, end it; "
            "two nodes with one key contradict each other, and validators refuse both"
        )
    return "no other node uses this key"


async def _traces(node: Node) -> tuple[bool, bool, float]:
    """Return whether storage has objects of this node's key, whether the node has a state, and until when the newest
    announcement of the key is valid (0 for none), in seconds since the Unix epoch.

    What the checks before this one write themselves counts neither as the one nor as the other.
    """
    key, expiry = node.key.public, 0.0
    of_checks = tuple(paths.kind_prefix(key, kind) for kind in ("probes", "revisions"))
    has_objects = await _lists_others(node.store, paths.writer_prefix(key), of_checks)
    has_state = await _lists_others(node.state, "", (*REMAKEABLE, AUTHORITY))
    with suppress(NotFoundError):
        record = (await fetch_record(node, Announcement, paths.participant(key))).record
        expiry = record.expires_ms / 1000
    return has_objects, has_state, expiry


async def _lists_others(store: ObjectStore, prefix: str, ignored: tuple[str, ...]) -> bool:
    async for info in store.list(prefix):
        if not info.path.startswith(ignored):
            return True
    return False


def _check_engine_weights(checks: RoleChecks) -> str:
    if checks.config.engine.kind != "vllm" or checks.role not in ("miner", "validator"):
        raise SkippedError("torch has the weights in the node's own memory")
    try:
        return trio.run(request_verification, engine_directory(checks.state)).finding()
    except NoAnswerError as error:
        raise SkippedError("the node does not run: `grailnode engine verify` asks it when it does") from error


def _check_acceptance(checks: RoleChecks) -> str:
    if not checks.takes_part:
        raise SkippedError(f"a {checks.role}{' without canaries' * (checks.role == 'trainer')} submits no rollouts")
    if _is_running(checks):
        raise SkippedError("the node of this name is running, and validators judge its rollouts")
    return judge_own_rollouts(
        checks.config, checks.node.run, _policy_at_hand(checks), checks=checks.role == "validator"
    )
