"""The task of the guide as a run of strangers: only the founder installs it, and the others get its wheel by digest."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grailnode import UserError
from grailnode.engine.policy import PACKAGED_POLICY
from grailnode.run import creation, requirements, workspace
from protocol import paths
from protocol.identity.signing import open_announced
from protocol.rollout.batch import Commitment, EpisodeRollout, open_group
from tests.support.builders.plugins import files_of_page, install, install_module
from tests.support.builders.recipes import demo_recipe
from tests.support.builders.tasks import open_sandbox
from tests.support.processes.command_line import fail
from tests.support.processes.programs import eventually
from tests.support.processes.separate_buckets import Machines, serving_buckets

RULES: dict[str, Any] = {"environment": "doubled-digits", "environment_config": '{"most": 99}', "max_tokens": 8}
EPISODES: dict[str, Any] = {"environment": "higher-lower", "turns": 6, "turn_tokens": 3, "reply_tokens": 8}
EPISODE_PROOF = PACKAGED_POLICY.parent / "proof-wordle.json"
ROLES = {"trainer": "trainer", "validator": "validator", "miner-1": "miner"}
TASKSET: dict[str, Any] = {"environment": "verifiers", "environment_config": '{"id": "doubles"}', "max_tokens": 8}
SOURCE = """
import verifiers.v1 as vf

class Doubling(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace): return trace.last_reply == str(2 * self.data.idx)

class Doubles(vf.Taskset[Doubling]):
    def load(self):
        return [Doubling(vf.TaskData(idx=idx, prompt=f"{idx}+{idx}=")) for idx in range(100)]

__all__ = ["Doubles"]
"""
SETTINGS = """
[trainer]
wheels = "{wheels}"
groups_per_step = 4

[miner]
groups = 4
"""


@pytest.fixture
def founder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> workspace.Workspace:
    """Return the directory of a run whose founder alone has the guide's plug-in, and a taskset of verifiers."""
    open_sandbox()
    monkeypatch.syspath_prepend(install(files_of_page(), tmp_path / "plugin"))
    monkeypatch.syspath_prepend(install_module("doubles", SOURCE, tmp_path / "taskset", ("verifiers",)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rules = getattr(request, "param", RULES)
    recipe = demo_recipe(group_size=4, groups=4, deposit=0.0, window=5.0, evaluation_problems=9, **rules)
    proof = EPISODE_PROOF if "turns" in rules else None
    return workspace.create(tmp_path / "founder", recipe, proof=proof, miners=("miner-1",))


@pytest.fixture
def machines(tmp_path: Path, founder: workspace.Workspace) -> Iterator[Machines]:
    settings = SETTINGS.format(wheels=founder.directory / "wheels")
    with serving_buckets(tmp_path / "buckets", ROLES) as (endpoint, public):
        machines = Machines(tmp_path, founder, ROLES, endpoint, public, settings=settings)
        yield machines
        machines.end()


def test_a_run_keeps_the_wheels_that_it_names(founder: workspace.Workspace) -> None:
    run = creation.open_run((founder.directory / "run.manifest").read_bytes()).record
    assert run.tasks[0].config == b'{"most":99}'
    folder = founder.directory / "wheels"
    (wheel,) = requirements.files_to_publish(run, None, folder).values()
    (ref,) = run.tasks[0].code
    assert len(wheel) == ref.size
    with pytest.raises(UserError, match=r"set \[trainer\] wheels$"):
        requirements.files_to_publish(run, None)
    file = folder / requirements.wheel_name(ref)
    file.write_bytes(wheel + b"\0")
    assert "not the wheel of this run, doubled-digits 1.0 (" in fail(
        "--role", "trainer", "--run", str(founder.config), "--name", "trainer"
    )
    file.unlink()
    with pytest.raises(UserError, match="the wheel cannot be read"):
        requirements.files_to_publish(run, None, folder)


def test_a_plugin_that_is_not_installed_or_in_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="unknown environment 'doubled-digits'; there are: "):
        workspace.create(tmp_path / "run", demo_recipe(**RULES))
    site = install(files_of_page(), tmp_path / "plugin")
    monkeypatch.syspath_prepend(site)
    (site / "doubled_digits-1.0.dist-info" / "direct_url.json").write_text('{"dir_info": {"editable": true}}')
    with pytest.raises(UserError, match="installed in place, without its files; install its wheel"):
        workspace.create(tmp_path / "run", demo_recipe(**RULES))
    (site / "doubled_digits-1.0.dist-info").rename(site / "doubled_digits.egg-info")  # as a build leaves it
    (site / "doubled_digits.egg-info/METADATA").rename(site / "doubled_digits.egg-info/PKG-INFO")
    (site / "doubled_digits.egg-info/WHEEL").unlink()
    with pytest.raises(UserError, match="has its sources, not its wheel; leave this folder out of PYTHONPATH"):
        workspace.create(tmp_path / "run", demo_recipe(**RULES))


MIXTURE = "addition=250000,doubled-digits=750000"


def test_a_plugin_can_be_a_member_of_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_sandbox()
    monkeypatch.syspath_prepend(install(files_of_page(), tmp_path / "plugin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rules = RULES | {"environment": MIXTURE, "environment_config": '{"doubled-digits": {"most": 99}}'}
    directory = workspace.create(tmp_path / "run", demo_recipe(**rules)).directory
    run = creation.open_run((directory / "run.manifest").read_bytes()).record
    assert run.task_name == MIXTURE
    assert [spec.config for spec in run.tasks] == [b"{}", b'{"most":99}']
    assert len(requirements.files_to_publish(run, None, directory / "wheels")) == 1
    refused = {"addition": "takes no configuration", "sat": "takes no configuration"}
    for name, reason in refused.items():
        with pytest.raises(UserError, match=reason):
            workspace.create(tmp_path / "no", demo_recipe(**(rules | {"environment_config": f'{{"{name}": {{}}}}'})))


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ("addition=1,sat=1", "add up to 1000000"),
        ("addition=500000,addition=500000", "different environments"),
        ("addition=1000000,", "a mixture is NAME=SHARE"),
        ("addition=01000000", "a mixture is NAME=SHARE"),
        ("addition=999999,chess=1", "unknown environment 'chess'"),
        ("math=999999,code-3.11=1", "several members read a data file"),
        ("addition=999999,wordle=1", "some members have turns"),
    ],
)
def test_what_is_no_mixture_is_refused_in_one_line(environment: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=reason):
        workspace.create(tmp_path / "run", demo_recipe(environment=environment))


@pytest.mark.parametrize(("role", "name"), [("miner", "miner-1"), ("validator", "validator")])
def test_a_node_without_a_sandbox_does_not_join(
    founder: workspace.Workspace, role: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bwrap = tmp_path / "bin" / "bwrap"  # the system's own, which is preferred to the packaged one
    bwrap.parent.mkdir()
    bwrap.write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", str(bwrap.parent))
    refusal = "grailnode: bubblewrap cannot create a sandbox here (bwrap: setting up uid map: Permission denied)"
    assert fail("--role", role, "--run", str(founder.config), "--name", name).startswith(refusal)
    assert not [path for path in (founder.directory / "store").rglob("*") if path.is_file()]


@pytest.mark.slow
@pytest.mark.parametrize("founder", [EPISODES | {"max_tokens": 8}], indirect=True)
def test_strangers_join_a_run_of_a_plugin_and_play_its_episodes(machines: Machines) -> None:
    """The miner comes when storage shows another wheel: it says so in one line, and waits for the right one."""
    run = creation.open_run((machines.workspace.directory / "run.manifest").read_bytes()).record
    (ref,) = run.tasks[0].code
    wheel = machines.directory / "buckets" / "trainer" / paths.file(machines.workspace.keys["trainer"], ref.digest)
    machines.start("trainer")
    eventually(lambda: wheel.is_file() and wheel.stat().st_size == ref.size, "the wheel of the run")
    true = wheel.read_bytes()
    wheel.write_bytes(true.replace(b"higher_lower", b"lower_higher"))
    machines.start("miner-1")
    eventually(lambda: bool(machines.events("miner-1", "miner-1", "files-missing")), "a line about the wheel")
    (line,) = machines.events("miner-1", "miner-1", "files-missing")
    assert line["error"] == f"{ref}: not the file that the run names, as storage shows it now"
    folder = machines.directory / "miner-1" / "state" / "wheels" / ref.digest.hex()
    assert not folder.exists()
    wheel.write_bytes(true)
    machines.start("validator")
    try:
        eventually(lambda: accepted(machines) >= 2, "accepted verdicts of the miner's groups")
    except AssertionError:
        pytest.fail(machines.terminal_output())
    assert (folder / "higher_lower.py").is_file()
    assert max(turns_of(machines, machines.workspace.keys["miner-1"])) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("founder", [TASKSET], indirect=True)
def test_strangers_join_a_run_of_an_extra_whose_wheels_only_its_founder_has(machines: Machines) -> None:
    run = creation.open_run((machines.workspace.directory / "run.manifest").read_bytes()).record
    codes = {code.distribution: code.digest.hex() for code in run.tasks[0].code}
    assert {"doubles", "grailnode-verifiers", "pydantic-core"} < set(codes)
    for name in ROLES:
        machines.start(name)
    eventually(lambda: accepted(machines) >= 2, "accepted verdicts of the miner's groups")
    wheels = machines.directory / "miner-1" / "state" / "wheels"
    assert sorted(folder.name for folder in wheels.iterdir()) == sorted(codes.values())
    assert (wheels / codes["grailnode-verifiers"] / "grailnode/environments/extras/verifiers.py").is_file()


def turns_of(machines: Machines, miner: bytes) -> list[int]:
    """Return how many turns each episode has that the first miner has stored."""
    bucket = machines.directory / "buckets" / "miner-1"
    turns = []
    for file in (bucket / paths.commitment(miner, 0)).parent.iterdir():
        commitment = open_announced(file.read_bytes(), Commitment).record
        batch = (bucket / paths.batch(miner, commitment.window, commitment.batch)).read_bytes()
        for index in range(len(commitment.groups)):
            offset, size = commitment.extent(index)
            group = open_group(batch[offset : offset + size], commitment, index)
            turns += [len(rollout.turns) for rollout in group.rollouts if isinstance(rollout, EpisodeRollout)]
    return turns


def accepted(machines: Machines) -> int:
    verdicts = machines.events("validator", "validator", "verdict")
    assert not [verdict for verdict in verdicts if verdict["rejected"]]
    return len([verdict for verdict in verdicts if verdict["accepted"]])
