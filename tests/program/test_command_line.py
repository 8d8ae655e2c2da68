"""The command line as people meet it: wrong flags, missing files, foreign keys."""

from pathlib import Path

import pytest

from tests.support.command_line import run_command
from tests.support.processes.programs import run_program


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    made = run_command("init", str(directory))
    assert made.returncode == 0, made.stderr
    assert made.stdout.count("grailnode --role") == 4
    return directory / "run.toml"


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--role", "miner"), 2, "--role needs --run FILE"),
        (("--role", "painter", "--run", "x"), 2, "'painter' is not one of"),
        (("demo", "--windows", "0"), 2, "0 is not in the range"),
        (("demo", "--wnidows", "3"), 2, "No such option"),
        (("frobnicate",), 2, "No such command"),
        (("verify", "--run", "/nowhere/run.toml"), 1, "no such file; `grailnode init DIR` writes one"),
        (("init", "/proc/grailnode"), 1, "/proc/grailnode"),
        (("verify", "--trust-run", "--run", "http://127.0.0.1:9"), 1, "names a server and no run"),
        (
            ("init", "x", "--join", "https://a.example/runs/ID", "--bucket", "mine", "--meeting", "met"),
            1,
            "https://a.example/runs/ID: which run?",
        ),
        (("init", "x", "--provider", "r2", "--url", "https://a.example"), 2, "--provider, --url: also give --bucket"),
        (("init", "x", "--meeting", "s3://met"), 2, "--meeting: also give --bucket"),
        (("init", "x", "--join", "https://a.example/runs/ID"), 2, "--join: also give --bucket"),
        (("init", "x", "--bucket", "mine", "--meeting", "s3://met"), 2, "--join and --meeting go together"),
    ],
)
def test_a_wrong_command_is_told_in_a_line_and_an_exit_code(arguments: tuple[str, ...], code: int, told: str):
    ended = run_command(*arguments)
    assert ended.returncode == code, ended.stderr
    assert told in ended.stderr


def test_a_run_without_a_trainer_yet_says_so(run_file: Path):
    ended = run_command("verify", "--run", str(run_file))
    assert ended.returncode == 1
    assert ended.stderr.startswith("grailnode: ")
    assert "head: no such object" in ended.stderr
    assert run_command("status", "--run", str(run_file)).returncode == 0


def test_only_the_runs_own_keys_may_train_or_validate(run_file: Path):
    run_command("keys", "new", str(run_file.parent / "keys" / "stranger.key"))
    ended = run_command("--role", "validator", "--run", str(run_file), "--name", "stranger")
    assert ended.returncode == 1
    assert "not a validator key of this run" in ended.stderr


def test_a_missing_key_is_not_made_anew_for_who_needs_that_one(run_file: Path):
    ended = run_command("--role", "validator", "--run", str(run_file), "--name", "validater")
    assert ended.returncode == 1
    assert "validater.key: no such key; use --name" in ended.stderr
    assert not (run_file.parent / "keys" / "validater.key").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--set", "engine.device=tpu"), 1, "engine.device: torch cannot use 'tpu' here"),
        (("--name", "a+b"), 2, "--name a+b: up to 32 letters"),
        (("--name", "../x"), 2, "--name ../x: up to 32 letters"),
        (("--name", ".."), 2, "--name ..: up to 32 letters"),
    ],
)
def test_what_no_node_can_run_with_is_told_before_it_starts(
    run_file: Path, arguments: tuple[str, ...], code: int, told: str
):
    ended = run_command("--role", "miner", "--run", str(run_file), *arguments)
    assert ended.returncode == code
    assert told in ended.stderr


@pytest.mark.parametrize("name", ["my miner", "../../escaped", ".."])
def test_a_name_that_no_role_would_take_is_refused_before_a_key_is_made_for_it(tmp_path: Path, name: str):
    joining = ("--join", f"https://founder.example.org/runs/{'0' * 64}", "--meeting", "founder")
    ended = run_command("init", str(tmp_path / "a" / "b"), "--bucket", "mine", *joining, "--name", name)
    assert ended.returncode == 2
    assert f"--name {name}: up to 32 letters" in ended.stderr
    assert not list(tmp_path.iterdir())


def test_keys_that_cannot_be_listed_are_not_shown_as_none(tmp_path: Path):
    assert run_command("init", str(tmp_path)).returncode == 0
    (tmp_path / "keys").rename(tmp_path / "elsewhere")
    (tmp_path / "keys").write_text("a file where the folder should be")
    ended = run_command("keys", "show", "--run", str(tmp_path / "run.toml"))
    assert ended.returncode == 1
    assert ended.stderr == f"grailnode: {tmp_path / 'keys'}: cannot be listed (not a directory)\n"


@pytest.mark.parametrize("size", [0, 700])
def test_a_manifest_that_is_cut_off_is_named(tmp_path: Path, size: int):
    assert run_command("init", str(tmp_path)).returncode == 0
    manifest = tmp_path / "run.manifest"
    manifest.write_bytes(manifest.read_bytes()[:size])
    ended = run_command("status", "--run", str(tmp_path / "run.toml"))
    assert ended.returncode == 1
    assert ended.stderr == f"grailnode: {manifest}, byte {size}: cut off\n"


def test_a_manifest_that_is_not_the_pinned_run_is_refused(run_file: Path, tmp_path: Path):
    other = run_command("init", str(tmp_path))
    assert other.returncode == 0
    (tmp_path / "run.manifest").write_bytes((run_file.parent / "run.manifest").read_bytes())
    ended = run_command("status", "--run", str(tmp_path / "run.toml"))
    assert ended.returncode == 1
    assert "run manifest: is run" in ended.stderr


def test_a_validator_is_named_later_and_the_quorum_rises(tmp_path: Path):
    run = ("--run", str(tmp_path / "run.toml"))
    assert run_command("init", str(tmp_path)).returncode == 0
    made = run_command("keys", "new", str(tmp_path / "keys" / "validator-2.key"))
    public = made.stdout.split()[-1]
    early = run_command("keys", "quorum", "2", *run)
    assert early.stderr == "grailnode: 2 of 1 validators can never accept; `grailnode keys grant` adds one\n"
    for arguments in (("grant", public), ("quorum", "2")):
        done = run_command("keys", *arguments, *run)
        assert done.returncode == 0, done.stderr
    assert "validators, 2 of which must accept" in done.stdout
    assert f"validator-2      {public} validator" in run_command("keys", "show", *run).stdout
    again = run_command("keys", "grant", public, *run)
    assert (again.returncode, again.stderr) == (1, f"grailnode: {public} is of the validators already\n")


def test_help_and_version_come_without_a_run():
    assert "grailnode demo" in run_program("--help").stdout
    assert "3 minutes" in run_command("demo", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--role", "miner"), 2, "--role needs --run FILE"),
        (("verify", "--run", "/nowhere/run.toml"), 1, "no such file; `grailnode init DIR` writes one"),
    ],
)
def test_a_process_exits_with_the_code_and_the_line_of_its_command(arguments: tuple[str, ...], code: int, message: str):
    ended = run_program(*arguments)
    assert ended.returncode == code, ended.stderr
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
