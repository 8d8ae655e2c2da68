"""The command line: wrong options, missing files, keys of other runs."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from grailnode.engine.policy import PACKAGED_POLICY
from grailnode.run.creation import open_run
from grailnode.run.key_files import read_or_create
from protocol.encoding import Record
from protocol.identity.signing import sign
from protocol.run import RunManifest
from tests.support.processes.command_line import fail, run_command, succeed

URL = f"https://Founder.example.org/runs/{'0' * 64}"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    assert succeed("init", str(directory)).count("grailnode --role") == 4
    return directory / "run.toml"


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("--role miner", 2, "--role needs --run FILE"),
        ("--role painter --run x", 2, "'painter' is not one of"),
        ("demo --windows 0", 2, "0 is not in the range"),
        ("demo --wnidows 3", 2, "No such option"),
        ("frobnicate", 2, "No such command"),
        ("rollouts --run x --miner ''", 2, "--miner is empty: give it a text, or leave it out"),
        ("chat --message= --run x", 2, "--message is empty"),
        ("keys mirrors --run x https://a.test ''", 2, "is empty: give it a text"),
        ("--role miner --run x --name ''", 2, "is empty: give it a text"),
        ("demo --out ''", 2, "is empty: give it a text"),
        *(
            (f"demo --policy smollm2 {option}", 2, "--policy smollm2")
            for option in ("--trainers 2", "--environment wordle")
        ),
        (
            f"evaluate {PACKAGED_POLICY} --environment additoin",
            1,
            "unknown environment 'additoin'; there are: addition",
        ),
        ("verify --run /nowhere/run.toml", 1, "no such file; `grailnode init DIR` writes one"),
        ("init /proc/grailnode", 1, "/proc/grailnode"),
        ("init x --join https://a.test/runs/ID --bucket mine --meeting met", 1, "https://a.test/runs/ID: which run?"),
        ("init x --region eu --url https://a.test", 2, "--region, --url: also give --bucket"),
        ("init x --meeting s3://met", 2, "--meeting: also give --bucket"),
        ("init x --join https://a.test/runs/ID", 2, "--join: also give --bucket"),
        ("init x --bucket mine --meeting s3://met", 2, "--join and --meeting go together"),
        (f"status --run {URL}", 1, f"grailnode: --run {URL}: a url is https://host"),
        (f"status --run {URL.lower()} --set store.attempts=0", 1, "grailnode: --set: store.attempts: "),
        (f"init x --join {URL} --bucket mine --meeting met", 1, f"grailnode: --join {URL}: a url is https://host"),
        *(
            (f"init x --bucket mine --join {URL.lower()} --meeting met --name '{name}'", 2, f"--name {name}: up to 32 ")
            for name in ("my miner", "../../escaped", "..")
        ),
    ],
)
def test_a_wrong_command_is_reported_in_a_line_and_writes_nothing(
    tmp_path: Path, command: str, code: int, message: str
):
    assert message in fail(*shlex.split(command), code=code, cwd=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_trainer_yet_says_so(run_file: Path):
    for command in (("verify",), ("export", str(run_file.parent / "model"))):
        error = fail(*command, "--run", str(run_file))
        assert error.startswith("grailnode: ")
        assert "head: this run has published no version yet; start its trainer" in error
    assert "--best and --worst: choose one" in fail("rollouts", "--best", "--worst", "--run", str(run_file), code=2)
    dashboard = fail("dashboard", "--local", "--host", "0.0.0.0", "--run", str(run_file), code=2)
    assert "--local with --host 0.0.0.0" in dashboard  # what this machine's logs say is for no other address
    assert "--window 999: not open yet" in fail("rollouts", "--run", str(run_file), "--window", "999")
    assert "its trainer has not published this file yet" in fail("rollouts", "--run", str(run_file), "--window", "0")
    assert run_command("status", "--run", str(run_file)).returncode == 0
    state = json.loads(succeed("status", "--run", str(run_file), "--json"))
    assert state["run_name"] == run_file.parent.name
    assert state["versions"] == []


def test_only_keys_of_the_run_may_train_or_validate(run_file: Path):
    run_command("keys", "new", str(run_file.parent / "keys" / "stranger.key"))
    options = ("--run", str(run_file), "--name", "stranger")
    assert "not a validator key of this run" in fail("--role", "validator", *options)
    error = fail("--role", "worker", *options)
    assert "not a worker key of this run" in error
    assert "`grailnode keys grant" in error


def test_a_trainer_does_not_train_alone_where_the_run_has_workers(run_file: Path):
    worker = str(run_file.parent / "keys" / "worker-1.key")
    run_command("keys", "new", worker)
    assert run_command("keys", "grant", worker, "--role", "worker", "--run", str(run_file)).returncode == 0
    assert "trainer.outer: missing, and this run has workers" in fail("--role", "trainer", "--run", str(run_file))


def test_a_missing_validator_key_is_not_created(run_file: Path):
    error = fail("--role", "validator", "--run", str(run_file), "--name", "validater")
    assert "validater.key: no such key; use --name" in error
    assert not (run_file.parent / "keys" / "validater.key").exists()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--role miner --set engine.device=tpu", 1, "engine.device: torch cannot use 'tpu' here"),
        ("--role miner --name a+b", 2, "--name a+b: up to 32 letters"),
        ("--role miner --name ../x", 2, "--name ../x: up to 32 letters"),
        ("--role miner --name ..", 2, "--name ..: up to 32 letters"),
        ("--role trainer --set trainer.gpus=9999", 1, "trainer.gpus: 9999, but this machine has"),
        (
            "--role trainer --set trainer.gpus=2 --set engine.device=meta",
            1,
            "engine.device: with trainer.gpus = 2 it is",
        ),
    ],
)
def test_an_unusable_setting_is_reported_before_a_node_starts(run_file: Path, options: str, code: int, message: str):
    assert message in fail("--run", str(run_file), *options.split(), code=code)


@pytest.mark.parametrize(
    ("cut", "bend", "reason"),
    [(0, 0, "byte 0: cut off"), (700, 0, "byte 700: cut off"), (None, 1, "run: the signature does not hold")],
)
def test_a_damaged_manifest_is_reported_by_its_path(tmp_path: Path, cut: int | None, bend: int, reason: str):
    assert run_command("init", str(tmp_path)).returncode == 0
    manifest = tmp_path / "run.manifest"
    data = manifest.read_bytes()
    manifest.write_bytes((data[:1000] + bytes([data[1000] ^ bend]) + data[1001:])[:cut])
    assert fail("status", "--run", str(tmp_path / "run.toml")) == (
        f"grailnode: {manifest}, run manifest: damaged ({reason}): restore it from a copy, or fetch it again\n"
    )


class OldScoring(Record):
    """How a run of another version of grailnode scores."""

    kind: ClassVar[str] = "scoring"
    exponent: float


def test_a_run_of_another_version_is_refused_in_one_line(tmp_path: Path):
    assert run_command("init", str(tmp_path)).returncode == 0
    path = tmp_path / "run.manifest"
    old: RunManifest = open_run(path.read_bytes()).record.model_copy(update={"scoring": OldScoring(exponent=2.0)})
    path.write_bytes(sign(old, read_or_create(tmp_path / "keys" / "root.key")))
    assert fail("status", "--run", str(tmp_path / "run.toml")) == (
        f"grailnode: {path}, run manifest: not a run of this version of grailnode (run.scoring.penalty: field "
        "required): create the run again, or use the version that did\n"
    )


def test_a_run_toml_that_a_full_disk_left_empty_does_not_mean_the_defaults(tmp_path: Path):
    (tmp_path / "run.toml").write_bytes(b"")
    for command in (("status",), ("--role", "trainer")):
        assert "run.toml: empty; restore it from a copy" in fail(*command, "--run", str(tmp_path))


def test_a_repair_takes_the_name_of_the_only_node_that_has_a_state(tmp_path: Path):
    assert run_command("init", str(tmp_path)).returncode == 0
    run = ("--run", str(tmp_path))
    assert f"give --name: {tmp_path / 'state'} has no state" in fail("repair", *run, code=2)
    for name in ("trainer", "trainer-canary-0", "miner-1"):
        (tmp_path / "state" / name / "objects").mkdir(parents=True)
    assert "has the states of miner-1, trainer" in fail("repair", *run, code=2)
    assert "has the states of miner-1, trainer" in fail("backup", str(tmp_path / "copy"), *run, code=2)
    (tmp_path / "state" / "miner-1" / "objects").rmdir()
    assert succeed("repair", *run) == "trainer: its state is whole\n"


@pytest.mark.parametrize(
    ("command", "code", "text"),
    [
        ("--help", 0, "Commands:"),
        ("evaluate --help", 0, "--environment"),
        ("chat --help", 0, "--run"),
        ("init --help", 0, "--environment"),
        ("environments", 0, "addition"),
        ("keys new miner.key", 0, "miner.key: "),
        ("status --fast", 2, "No such option"),
        ("inspect nowhere", 2, "does not exist"),
        ("status --run nowhere.toml", 1, "nowhere.toml: no such file; `grailnode init DIR` writes one"),
        ("status --run htps://example.org/runs/x", 1, "no such file; a URL begins with https://"),
        ("keys sign run.draft root.key", 1, "run.draft: not a draft of a revision"),
        ("keys show --run nowhere.toml", 1, "nowhere.toml: no such file"),
        ("--role trainer --run nowhere.toml", 1, "nowhere.toml: no such file"),
        ("publish . --step 1 --run nowhere.toml", 1, "nowhere.toml: no such file"),
        ("verify --run https://example.org", 1, "names a server and no run"),
        ("rollouts --run https://example.org/runs/x", 1, "give its id with --set run.id=ID"),
        ("complete", 0, "plain,engine"),
    ],
)
def test_what_needs_no_model_imports_no_torch(command: str, code: int, text: str, tmp_path: Path):
    call = f"import sys; from grailnode.cli.main import main; sys.argv[:] = {['grailnode', *command.split()]}; main()"
    check = f"import atexit, sys; atexit.register(lambda: print(*sorted(sys.modules))); {call}"
    completion = {"COMP_WORDS": "grailnode e", "COMP_CWORD": "1", "_GRAILNODE_COMPLETE": "bash_complete"}
    environment = os.environ | (completion if command == "complete" else {})
    arguments = [sys.executable, "-c", check]
    result = subprocess.run(arguments, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stderr
    assert text in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    modules = set(result.stdout.splitlines()[-1].split())
    assert "grailnode.cli.main" in modules
    assert "torch" not in modules


def test_a_terminal_without_unicode_gets_question_marks(tmp_path: Path):
    command = [sys.executable, "-m", "grailnode", "keys", "new", "a→b.key"]
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout[:9], result.stderr) == (0, "a?b.key: ", "")


OFFERS = {
    "grailnode e": "engine environments evaluate export",
    "grailnode evaluate --env": "--environment --environment-config",
    "grailnode keys ro": "rotate",
}


@pytest.mark.slow
def test_bash_completes_commands_and_options(tmp_path: Path):
    program = tmp_path / "grailnode"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m grailnode "$@"\n')
    program.chmod(0o755)
    script = """eval "$(_GRAILNODE_COMPLETE=bash_source grailnode)"
        for line in "$@"; do
            COMP_WORDS=($line); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
            _grailnode_completion grailnode; echo "${COMPREPLY[@]}"
        done"""
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "-c", script, "bash", *OFFERS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [*OFFERS.values()]


@pytest.mark.parametrize("parameters", [{}, {"run": "run.toml"}])
def test_an_interruption_while_modules_are_imported_ends_the_program_without_a_word(parameters: dict[str, str]):
    interrupted = (
        "import importlib, os, signal; from grailnode.cli import options; "
        "importlib.import_module = lambda name: os.kill(os.getpid(), signal.SIGINT); "
        f"options.run_action('demo_run', 'demo', {parameters})"
    )
    result = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")
