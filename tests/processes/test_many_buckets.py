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
from tests.support.command_line import run_command
from tests.support.processes.programs import eventually
from tests.support.processes.separate_buckets import Machines, serving_buckets

CHOICES = Choices(group_size=4, groups=4)
PACE = workspace.Pace(period_ms=500, groups_per_step=4, groups=4, evaluation_problems=0, anchor_interval=3)
ROLES = {"trainer": "trainer", "validator": "validator", "miner-1": "miner"}
SETTINGS = """
[trainer]
groups_per_step = 4
anchor_interval = 3

[miner]
groups = 4

[validator]
evaluation_problems = 0
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Machines]:
    with serving_buckets(tmp_path / "buckets", ROLES) as (endpoint, public):
        made = workspace.create(tmp_path / "founder", CHOICES, PACE, miners=("miner-1",))
        machines = Machines(tmp_path, made, ROLES, endpoint, public, settings=SETTINGS)
        yield machines
        machines.end()


def learned(site: Machines) -> bool:
    """Whether a version was published that came from groups of the miner which the validator accepted."""
    published = site.events("trainer", "trainer-upload", "published")
    accepted = [item for item in site.events("validator", "validator", "verdict") if item["accepted"]]
    return len(accepted) >= 3 and max((item["version"] for item in published), default=0) >= 2


def test_a_network_in_which_everybody_writes_to_a_bucket_of_their_own(site: Machines):
    site.start("trainer")
    rules = site.directory / "buckets" / "square" / "runs" / site.made.run_id.hex()
    eventually(rules.is_file, "the founder's node publishes the rules of the run")
    site.start("validator")
    site.start("miner-1")
    try:
        eventually(lambda: learned(site), "three accepted verdicts and two versions learned from them")
    except AssertionError:
        pytest.fail(site.told())
    for program in site.programs.values():
        program.interrupt()
    for program in site.programs.values():
        program.wait()

    for name in ROLES:  # nobody wrote anywhere else
        key = site.made.keys[name].hex()
        assert {path.name for path in (site.directory / "buckets" / name).iterdir()} == {key}
        announced = (site.directory / "buckets" / "square" / "participants" / key).read_bytes()
        assert open_announced(announced, Announcement).record.space == f"{site.public}/{name}"

    # a stranger with nothing but the URL
    checked = run_command("verify", "--run", site.manifest, "--set", "store.private_addresses=true", cwd=site.directory)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "holds: weights" in checked.stdout
    refused = run_command("verify", "--run", site.manifest, cwd=site.directory)
    assert refused.returncode == 1
    assert "store.private_addresses = true allows it" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
