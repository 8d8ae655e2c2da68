"""`grailnode demo --engine vllm` as a user starts it: its miners generate with vLLM, and validators believe them."""

from pathlib import Path

import pytest

from grailnode.ui.report import DemoReport
from tests.engine.vllm_site import vllm_python
from tests.support.processes.programs import ENVIRONMENT, run_program

HONEST = ("miner-1", "miner-2")

pytestmark = pytest.mark.vllm


def test_miners_with_vllm_are_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is found where `grailnode engine install` puts it by default."""
    (tmp_path / "grailnode").mkdir()
    (tmp_path / "grailnode" / "vllm").symlink_to(vllm_python().parents[1])
    monkeypatch.setitem(ENVIRONMENT, "XDG_DATA_HOME", str(tmp_path))
    accepted: dict[str, int] = {}
    for windows in (8, 40):  # windows have a fixed length: a busy machine needs more of them to show as much
        out = tmp_path / f"out-{windows}"
        result = run_program("demo", "--windows", str(windows), "--seed", "3", "--out", str(out), "--engine", "vllm")
        assert result.returncode == 0, result.stdout + result.stderr
        report = DemoReport.model_validate_json((out / "report.json").read_bytes())
        groups = {miner.name: miner for miner in report.state.miners}
        assert not any(groups[name].rejected for name in HONEST if name in groups)
        assert "cheat" not in groups or groups["cheat"].accepted == 0
        accepted = {name: groups[name].accepted for name in HONEST if name in groups}
        if len(accepted) == len(HONEST) and min(accepted.values()) > 0:
            return
    pytest.fail(f"accepted groups of the miners with vLLM: {accepted}")
