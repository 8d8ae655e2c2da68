"""`pytest --allowed-skips FILE`: a test that is skipped for another reason fails the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SKIPPED = """
import pytest

@pytest.mark.skip(reason="no rain today")
def test_rain(): ...

def test_snow():
    pytest.skip("too warm")
"""
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("workers", "reasons", "code", "message"),
    [
        ("0", "no rain today\ntoo warm\n", 0, "2 skipped"),
        ("1", "too warm\n", 1, "--allowed-skips does not list: test_weather.py::test_rain: no rain"),
        ("0", "", 1, "test_snow: too warm"),
    ],
)
def test_a_skip_for_a_reason_that_is_not_listed_fails_the_run(
    tmp_path: Path, workers: str, reasons: str, code: int, message: str
) -> None:
    (tmp_path / "test_weather.py").write_text(SKIPPED)
    (tmp_path / "reasons.txt").write_text(reasons)
    plugins = ["-p", "xdist", "-p", "no:cacheprovider", "-p", "tests.support.pytest_options.skip_guard"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", workers, *plugins, "--allowed-skips", "reasons.txt"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == code, result.stdout
    assert message in result.stdout
