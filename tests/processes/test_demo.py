"""`grailnode demo` as a newcomer starts it: what it leaves, and how it ends."""

import tempfile
from pathlib import Path

from grailnode.ui.report import read_report
from tests.support.processes.programs import Program, eventually, members, run_program


def temporary() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("grailnode-demo-*"))


def test_a_short_demo_writes_its_report_and_leaves_nothing_else(tmp_path: Path):
    before = temporary()
    out = tmp_path / "out"
    ended = run_program("demo", "--windows", "7", "--seed", "3", "--out", str(out))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert {file.name for file in out.iterdir()} == {"report.json", "report.html"}
    assert temporary() == before
    report = read_report(out / "report.json")
    assert len(set(report.weights_digest.values())) == 1
    assert set(report.weights_digest) == {"trainer", "validator", "miner-1", "miner-2", "cheat"}
    kinds = {miner.name: miner for miner in report.groups}
    assert kinds["cheat"].accepted == 0
    assert kinds["cheat"].submitted > 0
    for name in ("miner-1", "miner-2"):
        assert kinds[name].accepted > 0
        assert not kinds[name].rejected
    assert report.versions >= 2
    assert report.patch_bytes[1] is not None
    assert report.trainer_io_wait_fraction < 0.2


def test_ctrl_c_stops_everything(tmp_path: Path):
    before = temporary()
    demo = Program("demo", "--windows", "100", "--out", str(tmp_path / "out"), log=tmp_path / "terminal")
    try:
        eventually(lambda: len(members(demo.session)) >= 9, "the demo's processes")
        demo.interrupt()
        eventually(lambda: demo.process.poll() is not None and not members(demo.session), "everything has stopped")
        assert demo.wait(0) == 130
        assert temporary() == before
    finally:
        demo.end()
    assert "Traceback" not in (tmp_path / "terminal").read_text()
