"""The Dockerfiles, compose files, locks and health check, as far as they can be tested without a Docker engine."""

import importlib.util
import re
import shlex
import socket
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from grailnode.config import load
from grailnode.node.metrics import serve_metrics
from grailnode.node.process_launch import PROCESSES, Role
from grailnode.node.processes import metrics_port
from grailnode.node.state_locks import lock_state
from tests.deployment.commands import DOCKER, ROOT, Instruction, instructions, parse
from tests.support.processes.command_line import succeed
from tests.support.simulation.virtual_clock import running

DOCKERFILES = sorted(DOCKER.glob("Dockerfile*"))
COMPOSE = sorted(DOCKER.glob("compose*.yaml"))
LOCKS = sorted(DOCKER.glob("*.lock"))


def last_stage(file: Path) -> list[Instruction]:
    all_stages = instructions(file)
    return all_stages[max(place for place, (verb, _) in enumerate(all_stages) if verb == "FROM") :]


def faults(dockerfile: list[Instruction]) -> Iterator[str]:
    """Yield a line for each bad practice in a Dockerfile."""
    for verb, rest in dockerfile:
        if verb == "FROM" and not re.fullmatch(r"[a-z0-9./-]+:(?!latest\b)[\w.-]*\d[\w.-]*( AS \w+)?", rest):
            yield f"a base without a version: {rest}"
        if verb == "ADD":
            yield f"ADD fetches and unpacks; COPY copies: {rest}"
        if verb == "RUN" and "apt-get install" in rest and "rm -rf /var/lib/apt/lists" not in rest:
            yield f"the lists of apt stay: {rest}"
        if verb == "RUN" and "pip install" in rest and "--no-cache-dir" not in rest:
            yield f"pip's cache stays: {rest}"
        if verb == "RUN" and re.search(r"\b(curl|wget|sudo)\b", rest):
            yield f"something is fetched, or done as somebody else: {rest}"
        if verb in {"ENV", "ARG"} and re.search(r"(?i)secret|password|token|access_key", rest):
            yield f"a secret in an image: {rest}"


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_a_dockerfile_has_no_faults(file: Path):
    assert list(faults(instructions(file))) == []
    final = last_stage(file)
    verbs = [verb for verb, _ in final]
    assert [rest for verb, rest in final if verb == "USER"][-1] not in {"root", "0"}
    assert verbs.index("ENTRYPOINT") > verbs.index("USER")
    assert "HEALTHCHECK" in verbs
    assert ("ENTRYPOINT", '["grailnode"]') in final
    installed = [rest for verb, rest in instructions(file) if verb == "RUN" and "pip install" in rest]
    assert all("--require-hashes" in rest or "--no-deps --no-build-isolation ." in rest for rest in installed)


def variables(file: Path) -> dict[str, str]:
    """Return the environment variables of an image."""
    return dict(word.split("=", 1) for verb, rest in last_stage(file) if verb == "ENV" for word in shlex.split(rest))


def test_the_image_for_gpus_has_what_compiles_kernels():
    """Triton compiles a launcher in C before its first launch; Python's headers are in the base image."""
    runs = " ".join(rest for verb, rest in last_stage(DOCKER / "Dockerfile.cuda") if verb == "RUN")
    assert {"gcc", "libc6-dev"} <= set(re.findall(r"[\w-]+", runs.partition("apt-get install")[2].partition("&&")[0]))
    assert next(rest for verb, rest in last_stage(DOCKER / "Dockerfile.cuda") if verb == "FROM").startswith("python:")


def test_what_is_compiled_and_installed_lies_in_the_volume_of_the_run():
    """Services have a read-only root, and Docker mounts a tmpfs so that no compiled library can be loaded from it."""
    image = variables(DOCKER / "Dockerfile.cuda")
    compilers = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "VLLM_CACHE_ROOT")
    for name in (*compilers, "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        assert Path(image[name]).is_relative_to(dict(last_stage(DOCKER / "Dockerfile.cuda"))["WORKDIR"]), name
    assert variables(DOCKER / "Dockerfile")["XDG_DATA_HOME"] == image["XDG_DATA_HOME"]


def test_copied_files_exist_and_are_in_the_build_context():
    patterns = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for file in DOCKERFILES:
        for verb, rest in instructions(file):
            if verb != "COPY" or "--from=" in rest:
                continue
            for source in [part for part in rest.split() if not part.startswith("--")][:-1]:
                assert (ROOT / source).exists(), f"{file.name}: {source}"
                is_included = any(Path(source).match(pattern) or pattern == f"{source}/**" for pattern in patterns)
                assert is_included, f".dockerignore excludes {source}"


def services(file: Path) -> dict[str, dict[str, Any]]:
    by_name: dict[str, dict[str, Any]] = yaml.safe_load(file.read_text())["services"]
    return by_name


def substituted(text: str) -> str:
    """Replace `${NAME:-default}` of a compose file by the default, and `${NAME:?message}` by a folder."""
    return re.sub(r"\$\{\w+:\?[^}]*\}", "/given", re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


ALL_SERVICES = [
    pytest.param(file, name, service, id=f"{file.stem}/{name}")
    for file in COMPOSE
    for name, service in services(file).items()
]


@pytest.mark.parametrize(("file", "name", "service"), ALL_SERVICES)
def test_a_service_is_pinned_and_confined_and_its_command_is_valid(file: Path, name: str, service: dict[str, Any]):
    image = substituted(service["image"])
    assert re.fullmatch(r"[a-z0-9/]+:[\w.-]+", image)
    assert not image.endswith(":latest")
    assert not service.get("privileged")
    assert not re.search(r"(?i)(secret|password)[\w]*: (?!\$\{)\S", yaml.safe_dump(service.get("environment", {})))
    for volume in service.get("volumes", []):
        source, _, target = substituted(volume).rpartition(":")
        assert source.startswith("/") or source in yaml.safe_load(file.read_text())["volumes"]
        assert "docker.sock" not in volume
        if image.startswith("grailnode:"):
            assert target == dict(last_stage(DOCKERFILES[0]))["WORKDIR"]
    if not image.startswith("grailnode:"):
        return
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    if "entrypoint" in service:
        for part in service["command"][0].split("||"):
            words = shlex.split(part)
            if words[0] == "grailnode":
                parse(words[1:])
    else:
        parse([substituted(argument) for argument in service["command"]])


def roles(file: Path) -> list[tuple[str, str]]:
    pairs = []
    for service in services(file).values():
        if service["image"].startswith("grailnode:") and "entrypoint" not in service:
            ((_, values), *_) = parse([substituted(argument) for argument in service["command"]])
            if values["role"]:
                pairs.append((str(values["role"]), str(values["name"] or values["role"])))
    return sorted(pairs)


def test_the_compose_network_is_complete(tmp_path: Path):
    """Its nodes are those whose keys `init` creates, and all of them use one bucket."""
    file = DOCKER / "compose.yaml"
    command = shlex.split(services(file)["run"]["command"][0].partition("||")[2])
    succeed(*command[1:], cwd=tmp_path)
    directory = tmp_path / command[command.index("init") + 1]
    names = ("miner-1", "miner-2", "trainer", "validator", "validator-2")
    assert roles(file) == [(name.partition("-")[0], name) for name in names]
    assert set(names) <= {path.stem for path in (directory / "keys").iterdir()}
    key_table = succeed("keys", "show", "--run", str(directory / "run.toml"))
    roles_by_name = {line.split()[0]: line.split()[-1] for line in key_table.splitlines()[1:]}
    assert roles_by_name["validator"] == roles_by_name["validator-2"] == "validator"
    stores = set()
    for service in services(file).values():
        arguments = service.get("command", [])
        if service["image"].startswith("grailnode:") and "entrypoint" not in service:
            settings = [part.removeprefix("--set=") for part in arguments if part.startswith("--set=")]
            run = next(part.removeprefix("--run=") for part in arguments if part.startswith("--run="))
            stores.add(load(tmp_path / run, settings).store.model_dump_json())
    assert len(stores) == 1


@pytest.mark.parametrize("role", PROCESSES)
def test_each_role_has_a_compose_file(role: Role):
    assert [role_name for role_name, _ in roles(DOCKER / f"compose.{role}.yaml")] == [role]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_a_lock_satisfies_the_dependencies_of_the_project(lock: Path):
    lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    pinned: dict[str, str] = {}
    for line in lines:
        match = re.fullmatch(r"([a-z0-9.-]+)==([\w.+]+) --hash=sha256:[0-9a-f]{64}", line)
        assert match, line
        pinned[canonicalize_name(match[1])] = match[2]
    assert len(pinned) == len(lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), text
    assert "index-url" not in lock.read_text()
    assert ("+cpu" in pinned["torch"]) == (lock.stem == "cpu")


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docker_{name}", DOCKER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_lock_is_written_from_pips_report():
    archive = {"archive_info": {"hashes": {"sha256": "ab"}}}
    items = [{"metadata": {"name": name, "version": "1"}, "download_info": archive} for name in ("B_b", "a")]
    lines = _script("lock").lock_text({"install": items}).splitlines()
    assert lines[1:] == ["a==1 --hash=sha256:ab", "b-b==1 --hash=sha256:ab"]


@pytest.fixture
def health() -> ModuleType:
    return _script("healthcheck")


@pytest.mark.parametrize("role", PROCESSES)
def test_a_node_is_healthy_while_all_its_processes_live(health: ModuleType, role: Role, tmp_path: Path):
    (tmp_path / "run.toml").write_text("")
    arguments = ["/sbin/docker-init", "--", "grailnode", f"--role={role}", "--run", "run.toml", "--name", "it"]
    kinds = [kind for kind in PROCESSES[role] if kind in health.PROCESSES[role]]
    assert list(health.PROCESSES[role]) == kinds == list(PROCESSES[role])
    absent = {f"it/{kind}" for kind in kinds}
    assert set(health.absent_processes(arguments, tmp_path)) == absent
    files = []
    for kind in kinds:
        files.append(lock_state(tmp_path / "state" / "it", kind))
        absent.remove(f"it/{kind}")
        assert set(health.absent_processes(arguments, tmp_path)) == absent
    files[0].close()
    assert health.absent_processes(arguments, tmp_path) == [f"it/{kinds[0]}"]


def test_a_trainer_with_sites_is_healthy_while_its_coordinator_lives(health: ModuleType, tmp_path: Path):
    (tmp_path / "run.toml").write_text("[trainer.outer]\nlocal_steps = 4\n")
    arguments = ["grailnode", "--role=trainer", "--run", "run.toml"]
    assert health.absent_processes(arguments, tmp_path) == ["trainer/coordinator"]
    with lock_state(tmp_path / "state" / "trainer", "coordinator"):
        assert health.absent_processes(arguments, tmp_path) == []


def test_a_process_with_a_metrics_port_must_answer(health: ModuleType, tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (tmp_path / "run.toml").write_text(f"[node]\nmetrics_port = {port}\n")
    config = load(tmp_path / "run.toml")
    for processes in (*health.PROCESSES.values(), health.COORDINATOR):
        assert all(metrics_port(config, kind) == port + offset for kind, offset in processes.items())
    arguments = ["grailnode", "--role", "miner", "--run", "run.toml"]
    with lock_state(tmp_path / "state" / "miner-1", "miner"):
        assert health.absent_processes(arguments, tmp_path) == ["miner-1/miner"]

        async def ask() -> list[str]:
            async with running(serve_metrics, port, bytes):
                while not await trio.to_thread.run_sync(health.answers, port):
                    await trio.sleep(0.01)
                absent: list[str] = await trio.to_thread.run_sync(health.absent_processes, arguments, tmp_path)
            return absent

        assert trio.run(ask) == []
