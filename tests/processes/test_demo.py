"""`grailnode demo` as a newcomer starts it: what it leaves, and how it ends."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grailnode.demo.demo_network import DemoSettings
from grailnode.engine.vllm.installation import VllmEnvironment
from grailnode.run import workspace
from grailnode.ui.report_data import DemoReport
from tests.support.processes import programs
from tests.support.processes.deployment import follow_first_run, follow_pages, make_deployment
from tests.support.processes.programs import Program, eventually, members, run_program

NODES = {"trainer", "validator", "miner-1", "miner-2", "cheat"}


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder for temporary files of the programs of one test, with a path short enough for sockets in it."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setitem(programs.ENVIRONMENT, "TMPDIR", folder)
        yield Path(folder)


def run_demo(out: Path, windows: int, *options: str) -> DemoReport:
    result = run_program("demo", "--windows", str(windows), "--seed", "3", "--out", str(out), *options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert {file.name for file in out.iterdir()} == {"report.json", "report.html"}
    report = DemoReport.model_validate_json((out / "report.json").read_bytes())
    assert len(report.state.windows) <= windows
    return report


def has_progress(report: DemoReport) -> bool:
    """Return whether the machine was fast enough for every node to take part in these windows."""
    accepted_groups = {miner.name: miner.accepted for miner in report.state.miners}
    return (
        set(report.weights_digest) == NODES
        and len(report.state.versions) >= 2
        and accepted_groups.keys() >= {"miner-1", "miner-2", "cheat"}
        and min(accepted_groups["miner-1"], accepted_groups["miner-2"]) > 0
        and report.trainer_io_wait_fraction < 0.2
    )


@pytest.mark.parametrize(
    ("environment", "engine"),
    [("addition", "torch"), ("addition", "vllm"), ("wordle", "torch"), ("wordle", "vllm"), ("calculator", "torch")],
)
def test_the_packaged_thresholds_are_those_of_each_task_and_engine(
    environment: str, engine: str, tmp_path: Path
) -> None:
    vllm = VllmEnvironment(tmp_path / "python", "cpu") if engine == "vllm" else None
    demo = DemoSettings(1, 0, tmp_path, keep=False, command="", vllm=vllm, environment=environment)
    workspace.create(tmp_path / "run", demo.recipe, policy=demo.policy, proof=demo.proof, miners=("miner-1",))


@pytest.mark.slow
def test_two_sites_learn_in_one_demo(tmp_path: Path, temporary: Path):
    def sites_took_part(report: DemoReport) -> bool:
        return (
            has_progress(report)
            and len(report.state.sites) == 2
            and min(site.rounds for site in report.state.sites) > 0
        )

    for windows in (24, 60, 120):
        report = run_demo(tmp_path / f"out-{windows}", windows, "--trainers", "2")
        assert not list(temporary.glob("grailnode-demo-*"))
        if sites_took_part(report):
            break
    assert sites_took_part(report)
    assert [site.name for site in report.state.sites] == ["worker-1", "worker-2"]
    assert all(site.steps > 0 and site.groups >= site.steps and site.payload_bytes > 0 for site in report.state.sites)
    assert sum(item.groups for item in report.state.rounds) == sum(site.groups for site in report.state.sites)
    assert len(set(report.weights_digest.values())) == 1
    html = (tmp_path / f"out-{windows}" / "report.html").read_text()
    assert "<h2>Sites</h2>" in html


@pytest.mark.slow
def test_ctrl_c_stops_everything(tmp_path: Path, temporary: Path):
    demo = Program("demo", "--windows", "100", "--out", str(tmp_path / "out"), log=tmp_path / "terminal")
    try:
        eventually(lambda: len(members(demo.session)) >= 9, "the demo's processes")
        demo.interrupt()
        eventually(lambda: demo.process.poll() is not None and not members(demo.session), "everything has stopped")
        assert demo.wait(0) == 130
        assert not list(temporary.glob("grailnode-demo-*"))
    finally:
        demo.end()
    assert "Traceback" not in (tmp_path / "terminal").read_text()


# The first hour: the commands of docs/guide lead to a verified window, on one machine and between strangers


@pytest.mark.slow
@pytest.mark.parametrize("page", ["first-run.md", "founder.md to miner.md"])
def test_the_commands_of_a_page_lead_to_a_verified_window(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, stages = time.monotonic(), list[str]()

    def note(stage: str) -> None:
        stages.append(stage)
        with capsys.disabled():
            print(f"\n{page}: {stage[:60]} after {time.monotonic() - start:.0f} s", end="")

    if page == "first-run.md":
        follow_first_run(tmp_path, note)
    else:
        with make_deployment(tmp_path) as deployment:
            follow_pages(deployment, note)
    assert "first verified window" in stages[:-1]
