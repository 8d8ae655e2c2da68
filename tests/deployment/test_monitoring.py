"""docker/monitoring: its rules and its dashboard use metrics that the program has, and Prometheus takes them."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from grailnode.node.metrics import ALARMS, SPECS
from grailnode.node.telemetry import NodeTelemetry

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker" / "monitoring"
RULES, DASHBOARD = FOLDER / "alerts.yaml", FOLDER / "grafana.json"
SOURCE = "\n".join(
    file.read_text(encoding="utf-8") for folder in ("roles", "grailnode") for file in (ROOT / folder).rglob("*.py")
)
"""All of the product that logs events, as one text."""


def full_telemetry() -> NodeTelemetry:
    """Return telemetry with a sample of every metric."""
    telemetry = NodeTelemetry("trainer/upload")
    for spec in SPECS:
        telemetry.event(spec.event or "started", **({spec.field: 1.5} if spec.field else {}))
    telemetry.event("disk-failing", waits_for="disk", seconds=1.5)
    telemetry.metrics.record("put", "ok", 100, 0.25)
    return telemetry


@pytest.mark.parametrize("file", [RULES, DASHBOARD], ids=lambda file: file.name)
def test_every_metric_that_is_used_is_exposed(file: Path) -> None:
    exposed = set(re.findall(r"^(\w+)[ {]", full_telemetry().metrics.exposition().decode(), re.MULTILINE)) | {"up"}
    used = set(re.findall(r"\b(?:grailnode|process)_\w+|\bup(?={)", file.read_text(encoding="utf-8")))
    assert len(used) >= 6
    assert used <= exposed


@pytest.mark.parametrize("file", [RULES, DASHBOARD], ids=lambda file: file.name)
def test_every_event_that_is_used_is_logged(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    selected = re.findall(r'event=~?\\?"([\w|-]+)', text)
    events = {event for selector in selected for event in selector.split("|")}
    waits = {"beacon-late", "cannot-follow", "disk-failing"} if "grailnode_waiting_since_seconds" in text else set()
    assert events | waits >= ALARMS.keys() | {"published"}
    assert not [event for event in events if f'"{event}"' not in SOURCE]


def test_a_metric_of_an_event_is_a_number_of_it() -> None:
    calls = [node for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.Call) and node.args]
    for spec in SPECS:
        if spec.event:
            own = [call for call in calls if getattr(call.args[0], "value", None) == spec.event]
            assert {spec.field, None} & {keyword.arg for call in own for keyword in call.keywords}, spec  # None is **


def test_names_follow_the_conventions_of_prometheus() -> None:
    for spec in SPECS:
        assert spec.name.startswith("grailnode_")
        assert spec.name.endswith("_total") == (spec.kind == "counter")
        assert spec.help.endswith(".")
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|percent|fraction)(_|$)", spec.name)


def test_promtool_takes_metrics_rules_and_their_tests() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on this machine (apt-get install prometheus)")
    for command in (("check", "config", "prometheus.yaml"), ("test", "rules", "alerts_test.yaml")):
        result = subprocess.run([promtool, *command], cwd=FOLDER, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    exposition = full_telemetry().metrics.exposition()
    lint = subprocess.run([promtool, "check", "metrics"], input=exposition, capture_output=True, check=False)
    assert (lint.returncode, lint.stdout, lint.stderr) == (0, b"", b"")
