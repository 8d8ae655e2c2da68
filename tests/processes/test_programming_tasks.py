"""A run on one's own programming tasks, as real processes with the real sandbox; and what a node says that cannot take
part.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from grailnode.sandbox import BubblewrapSandbox
from protocol import paths
from protocol.encoding import REWARD_UNIT
from protocol.identity.signing import open_announced
from protocol.judging.verdict import Verdict
from tests.support.builders.policies import write_speaking_policy
from tests.support.builders.recipes import demo_rules
from tests.support.builders.tasks import OWN, open_sandbox
from tests.support.processes.command_line import fail
from tests.support.processes.network_of_processes import NetworkOfProcesses
from tests.support.processes.programs import eventually

RIGHT = "<think>a</think><solution>def f(x): return x + 1</solution>"
HALF = "<solution>def f(x): return 2</solution>"
HOSTILE = "<solution>import os\nwhile True: os.fork()</solution>"
DUE = {1.0, 0.55, 0.2, 0.0}  # as rewards: of these three, and of what is no solution


@pytest.fixture(scope="session")
def sandbox() -> BubblewrapSandbox:
    return open_sandbox()


@pytest.fixture
def network(tmp_path: Path) -> Iterator[NetworkOfProcesses]:
    tests = ["assert f(1) == 2", "assert f(2) == 3"]
    tasks = [{"text": f"Task {number}.", "code": "def f(x): return 1 + x", "test_list": tests} for number in range(20)]
    data = tmp_path / "my tasks.jsonl"
    data.write_text("\n".join(map(json.dumps, tasks)))
    write_speaking_policy(tmp_path / "policy", [RIGHT, HALF, HOSTILE])
    rules = demo_rules(
        environment=f"code-{OWN}", data=data, max_tokens=1, group_size=4, groups=2, deposit=0.0, window=5.0,
        rounds=20, commit_rounds=14, audit_rounds=16, seal_rounds=40, verdict_rounds=60,
    )  # fmt: skip
    network = NetworkOfProcesses(tmp_path / "run", rules, tmp_path / "policy")
    data.unlink()  # the run has its own copy
    yield network
    network.end()


def verdicts(network: NetworkOfProcesses) -> list[Verdict]:
    store = network.workspace.directory / "store"
    files = (store / paths.verdicts(network.workspace.keys["validator"], 0)).parent.rglob("*")
    return [open_announced(file.read_bytes(), Verdict).record for file in files if file.is_file()]


def observed_rewards(network: NetworkOfProcesses) -> set[float]:
    judgements = [judgement for verdict in verdicts(network) for judgement in verdict.judgements]
    return {reward / REWARD_UNIT for judgement in judgements for reward in judgement.rewards}


@pytest.mark.slow
def test_programs_are_written_tried_and_trained_on(sandbox: BubblewrapSandbox, network: NetworkOfProcesses):
    assert sandbox.python == OWN
    for role, name in (("trainer", "trainer"), ("validator", "validator"), ("miner", "miner-1")):
        network.start(role, name)
    eventually(lambda: observed_rewards(network) >= DUE - {0.0}, "verdicts")
    eventually(lambda: network.newest_version() >= 1, "a version that was trained on them")
    network.stop()
    judgements = [judgement for verdict in verdicts(network) for judgement in verdict.judgements]
    assert all(judgement.accepted for judgement in judgements)
    assert observed_rewards(network) <= DUE


def error_of_start(network: NetworkOfProcesses, role: str, name: str) -> str:
    return fail("--role", role, "--run", str(network.workspace.config), "--name", name)


@pytest.mark.parametrize(("role", "name"), [("miner", "miner-1"), ("validator", "validator")])
def test_a_node_without_a_sandbox_does_not_join(
    network: NetworkOfProcesses, role: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bwrap = tmp_path / "bin" / "bwrap"  # the system's own, which is preferred to the packaged one
    bwrap.parent.mkdir()
    bwrap.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", str(bwrap.parent))
    refusal = "grailnode: bubblewrap cannot create a sandbox here (bwrap: setting up uid map: Permission denied)"
    assert error_of_start(network, role, name).startswith(refusal)
    assert not [path for path in (network.workspace.directory / "store").rglob("*") if path.is_file()]
