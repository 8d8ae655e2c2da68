"""Nobody shares a bucket: trainer, miner and validator as real processes over a real S3 server, each writing to its own
alone.

They write with credentials through one rclone, and read each other without any through another, as strangers read
public buckets.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from grailnode.run import workspace
from grailnode.run.creation import Choices
from protocol.identity.participant import Announcement
from protocol.identity.signing import open_announced
from tests.support.processes.command_line import run_command
from tests.support.processes.programs import eventually
from tests.support.processes.separate_buckets import Machines, serving_buckets

CHOICES = Choices(group_size=4, groups=4, deposit=0.0)
PACE = workspace.Pace(period_ms=500, groups_per_step=4, groups=4, evaluate=False, anchor_interval=3)
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
def network(tmp_path: Path) -> Iterator[Machines]:
    with serving_buckets(tmp_path / "buckets", ROLES) as (endpoint, public):
        founder = workspace.create(tmp_path / "founder", CHOICES, PACE, miners=("miner-1",))
        machines = Machines(tmp_path, founder, ROLES, endpoint, public, settings=SETTINGS)
        yield machines
        machines.end()


def has_learned(network: Machines) -> bool:
    """Return whether the trainer has learned from the miner's groups: two versions and three accepting verdicts."""
    publications = network.events("trainer", "trainer-upload", "published")
    accepting_verdicts = [item for item in network.events("validator", "validator", "verdict") if item["accepted"]]
    return len(accepting_verdicts) >= 3 and max((item["version"] for item in publications), default=0) >= 2


@pytest.mark.slow
def test_a_network_in_which_everybody_writes_to_a_bucket_of_their_own(network: Machines):
    network.start("trainer")
    rules = network.directory / "buckets" / "square" / "runs" / network.workspace.run_id.hex()
    eventually(rules.is_file, "the founder's node publishes the rules of the run")
    network.start("validator")
    network.start("miner-1")
    try:
        eventually(lambda: has_learned(network), "three accepted verdicts and two versions learned from them")
    except AssertionError:
        pytest.fail(network.terminal_output())
    for program in network.programs.values():
        program.interrupt()
    for program in network.programs.values():
        program.wait()

    for name in ROLES:  # nobody wrote anywhere else
        key = network.workspace.keys[name].hex()
        assert {path.name for path in (network.directory / "buckets" / name).iterdir()} == {key}
        announcement = (network.directory / "buckets" / "square" / "participants" / key).read_bytes()
        assert open_announced(announcement, Announcement).record.space == f"{network.public}/{name}"

    # a stranger with nothing but the URL
    verify_result = run_command(
        "verify", "--run", network.manifest, "--set", "store.private_addresses=true", cwd=network.directory
    )
    assert verify_result.returncode == 0, verify_result.stdout + verify_result.stderr
    assert "holds: weights" in verify_result.stdout
    refusal = run_command("verify", "--run", network.manifest, cwd=network.directory)
    assert refusal.returncode == 1
    assert "store.private_addresses = true allows it" in refusal.stderr
    assert len(refusal.stderr.splitlines()) == 1
