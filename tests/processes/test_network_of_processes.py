"""Networks as real processes over a real directory or a real S3 server, killed with kill -9."""

import os
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from grailnode.run import workspace
from protocol.identity.participant import Announcement
from protocol.identity.signing import open_announced
from tests.support.builders.recipes import demo_recipe
from tests.support.processes.command_line import fail, succeed
from tests.support.processes.network_of_processes import NetworkOfProcesses, wait_until_gone
from tests.support.processes.programs import eventually, members, run_program
from tests.support.processes.separate_buckets import Machines, serving_buckets
from tests.support.processes.stepwise_trainer import StepwiseTrainer, make_run


@pytest.mark.slow
def test_every_role_survives_kill_9_and_the_chain_stays_whole(network: NetworkOfProcesses):
    """The terminal of the trainer that comes back takes nothing."""
    roles = {"trainer": "trainer", "validator": "validator", "miner-1": "miner", "miner-2": "miner"}
    for name, role in roles.items():
        network.start(role, name)
    eventually(lambda: network.newest_version() >= 2, "the first versions")
    for name in ("validator", "miner-1"):
        result = run_program("--role", roles[name], "--run", str(network.workspace.config), "--name", name)
        assert (result.returncode, "in use by another" in result.stderr) == (1, True)

    for names in (("miner-1", "validator"), ("trainer",)):
        victims = [network.programs[name] for name in names]
        for victim in victims:
            victim.kill()
        for victim in victims:
            wait_until_gone(victim)
        progress = network.progress()
        for name in names:
            terminal = Path("/dev/full") if name == "trainer" else None
            network.start(roles[name], name, terminal=terminal)
        eventually(partial(network.is_beyond, progress), f"new versions and verdicts after {names} came back")

    training = members(network.programs["trainer"].session)[-1]  # the newest process: one that the supervisor started
    progress = network.progress()
    os.kill(training, signal.SIGKILL)
    eventually(partial(network.is_beyond, progress), "progress after a process of the trainer was killed")

    network.stop()
    assert network.programs["trainer"].wait() == 0

    output = succeed("verify", "--run", str(network.workspace.config))
    assert "summaries linked" in succeed("verify", "--run", str(network.workspace.config), "--ledger")
    newest = network.newest_version()
    # Ctrl-C may come when storage has a head that the trainer has no answer about yet
    assert any(f"version {version} holds" in output for version in (newest, newest + 1))
    versions = [event["version"] for event in network.events("trainer-upload", "published")]
    assert versions == sorted(versions)
    assert set(versions) == set(range(versions[-1] + 1))
    verdicts = network.events("validator", "verdict")
    assert verdicts
    assert all(verdict["rejected"] == 0 for verdict in verdicts)
    digests = network.values(("miner-1", "miner-2", "validator"), "serving", "version", "weights")
    assert all(len(values) == 1 for values in digests.values())

    for patch in (network.workspace.directory / "store").glob("*/patches/*"):
        data = patch.read_bytes()
        patch.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert "not the bytes of this digest" in fail("verify", "--run", str(network.workspace.config))

    assert "miner-1" in succeed("status", "--run", str(network.workspace.config))


# A trainer's real processes killed with kill -9: its versions have the weights of one that nothing happened to, bit
# for bit


VERSIONS = 4


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_trainers_weights_are_those_of_one_that_lived(tmp_path: Path, ranks: int):
    directory = make_run(tmp_path / "lived")
    settings = directory / "run.toml"
    settings.write_text(settings.read_text().replace("[trainer]\n", f"[trainer]\ngpus = {ranks}\n"))
    before = shutil.copytree(directory, tmp_path / "killed")
    weights = StepwiseTrainer(directory).publish_versions(VERSIONS)
    assert len(set(weights.values())) == len(weights) == VERSIONS + 1
    killed_trainer = StepwiseTrainer(before, kills=6)
    assert killed_trainer.publish_versions(VERSIONS) == weights
    assert killed_trainer.kill_counts


# Nobody shares a bucket: trainer, miner and validator as real processes over a real S3 server, each writing to its
# own alone. They write with credentials through one rclone, and read each other without any through another, as
# strangers read public buckets.


RECIPE = demo_recipe(group_size=4, groups=4, deposit=0.0, window=4.0)
ROLES = {"trainer": "trainer", "validator": "validator", "miner-1": "miner"}
SETTINGS = """
[trainer]
groups_per_step = 4
anchor_interval = 3

[miner]
groups = 4

[validator]
evaluate = false
"""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with serving_buckets(tmp_path / "buckets", ROLES) as (endpoint, public):
        founder = workspace.create(tmp_path / "founder", RECIPE, miners=("miner-1",))
        machines = Machines(tmp_path, founder, ROLES, endpoint, public, settings=SETTINGS)
        yield machines
        machines.end()


def has_learned(machines: Machines) -> bool:
    """Return whether the trainer has learned from the miner's groups: two versions and three accepting verdicts."""
    publications = machines.events("trainer", "trainer-upload", "published")
    accepting_verdicts = [item for item in machines.events("validator", "validator", "verdict") if item["accepted"]]
    return len(accepting_verdicts) >= 3 and max((item["version"] for item in publications), default=0) >= 2


@pytest.mark.slow
def test_a_network_in_which_everybody_writes_to_a_bucket_of_their_own(machines: Machines):
    """500 announcements are junk, and at last a second trainer is started with the first one's key and older state."""
    square, trainer = machines.directory / "buckets" / "square", machines.directory / "trainer"
    (square / "participants").mkdir()
    for number in range(500):
        (square / "participants" / number.to_bytes(32, "big").hex()).write_bytes(b"junk" * number)
    machines.start("trainer")
    eventually((square / "runs" / machines.workspace.run_id.hex()).is_file, "the rules of the run are published")
    eventually(lambda: bool(machines.events("trainer", "trainer-upload", "published")), "the first version")
    shutil.copytree(trainer, machines.directory / "yesterday")
    machines.start("validator")
    machines.start("miner-1")
    try:
        eventually(lambda: has_learned(machines), "three accepted verdicts and two versions learned from them")
    except AssertionError:
        pytest.fail(machines.terminal_output())

    twin = run_program("--role", "trainer", "--run", str(machines.directory / "yesterday" / "run.toml"))
    assert twin.returncode == 1
    lines = [line for line in twin.stderr.splitlines() if "which this node's state did not publish" in line]
    assert len(lines) == 1
    assert "`grailnode repair --run " in lines[0]
    assert machines.programs["trainer"].process.poll() is None

    for program in machines.programs.values():
        program.interrupt()
    for program in machines.programs.values():
        program.wait()

    for name in ROLES:  # nobody wrote anywhere else
        key = machines.workspace.keys[name].hex()
        assert {path.name for path in (machines.directory / "buckets" / name).iterdir()} == {key}
        announcement = (square / "participants" / key).read_bytes()
        assert open_announced(announcement, Announcement).record.space == f"{machines.public}/{name}"

    # a stranger with nothing but the URL
    assert "holds: weights" in succeed("verify", "--run", machines.manifest, cwd=machines.directory)
