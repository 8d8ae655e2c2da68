"""Nobody shares a bucket: trainer, miner and validator as real processes over a real S3 server, each writing to its own alone.

They write with credentials through one rclone, and read each other without any through another, as strangers read public buckets.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grailnode import workspace
from grailnode.founding import Choices
from grailnode.store.s3_session import S3Credentials, S3Location, S3Session
from protocol.participant import Announcement
from protocol.signing import open_announced
from tests.processes.programs import Program, eventually, grailnode
from tests.store.rclone import serving

CREDENTIALS = S3Credentials("loopback-access", "loopback-secret")
CHOICES = Choices(group_size=4, groups=4)
PACE = workspace.Pace(period_ms=500, groups_per_step=4, groups=4, evaluation_problems=0, anchor_interval=3)
ROLES = {"trainer": "trainer", "validator": "validator", "miner-1": "miner"}

_CONFIG = """
[run]
manifest = "{public}/square/runs/{run_id}"

[store]
kind = "s3"
bucket = "{name}"
endpoint = "{endpoint}"
addressing = "path"
credentials = "s3.credentials"
url = "{public}/{name}"
private_addresses = true

[store.meeting]
kind = "s3"
bucket = "square"
endpoint = "{endpoint}"
addressing = "path"
credentials = "s3.credentials"

[beacon]
key = "{beacon}"

[trainer]
groups_per_step = 4
anchor_interval = 3

[miner]
groups = 4

[validator]
evaluation_problems = 0
"""


class Site:
    """A founder's keys, one directory a machine, and the programs started there."""

    def __init__(self, directory: Path, endpoint: str, public: str) -> None:
        self.directory, self.public = directory, public
        self.made = workspace.create(directory / "founder", CHOICES, PACE, miners=("miner-1",))
        self.programs: dict[str, Program] = {}
        for name in ROLES:
            self._machine(name, endpoint)

    def _machine(self, name: str, endpoint: str) -> None:
        """What one participant has: its own key, its own credentials, and where they meet."""
        home = self.directory / name
        (home / "keys").mkdir(parents=True)
        trainer = name == "trainer"
        for key in (name, "beacon") if trainer else (name,):
            shutil.copy(self.made.directory / "keys" / f"{key}.key", home / "keys")
        secret = home / "s3.credentials"
        secret.touch(0o600)
        secret.write_text(
            f"[default]\naws_access_key_id={CREDENTIALS.access_key}\naws_secret_access_key={CREDENTIALS.secret_key}\n"
        )
        values = {"public": self.public, "endpoint": endpoint, "name": name, "run_id": self.made.run_id.hex()}
        text = _CONFIG.format(**values, beacon="beacon" if trainer else "")
        if trainer:  # the founder has the manifest as a file; its node publishes it
            shutil.copy(self.made.directory / "run.manifest", home)
            text = text.replace(f"{self.public}/square/runs/{self.made.run_id.hex()}", "run.manifest")
        (home / "run.toml").write_text(text)

    def start(self, name: str) -> None:
        run = str(self.directory / name / "run.toml")
        log = self.directory / f"{name}.terminal"
        self.programs[name] = Program("--role", ROLES[name], "--run", run, "--name", name, log=log)

    def events(self, name: str, process: str, event: str) -> list[dict[str, Any]]:
        file = self.directory / name / "logs" / f"{process}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [item for item in found if item["event"] == event]

    def learned(self) -> bool:
        """Whether a version was published that came from groups of the miner which the validator accepted."""
        published = self.events("trainer", "trainer-upload", "published")
        accepted = [item for item in self.events("validator", "validator", "verdict") if item["accepted"]]
        return len(accepted) >= 3 and max((item["version"] for item in published), default=0) >= 2

    def told(self) -> str:
        return "\n".join(f"--- {file.stem}\n{file.read_text()[-3000:]}" for file in self.directory.glob("*.terminal"))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    buckets = tmp_path / "buckets"
    buckets.mkdir()
    signed = ("--auth-key", f"{CREDENTIALS.access_key},{CREDENTIALS.secret_key}")
    with serving(buckets, *signed) as endpoint:
        session = S3Session(S3Location("square", endpoint, addressing="path"), CREDENTIALS)
        for name in ("square", *ROLES):
            session.client.create_bucket(Bucket=name)
        session.close()
        with serving(buckets, "--read-only", "--dir-cache-time", "0s") as public:
            site = Site(tmp_path, endpoint, public)
            yield site
            for program in site.programs.values():
                program.end()


def test_a_network_in_which_everybody_writes_to_a_bucket_of_their_own(site: Site):
    site.start("trainer")
    manifest = f"{site.public}/square/runs/{site.made.run_id.hex()}"
    rules = site.directory / "buckets" / "square" / "runs" / site.made.run_id.hex()
    eventually(rules.is_file, 120, "the founder's node publishes the rules of the run")
    site.start("validator")
    site.start("miner-1")
    try:
        eventually(site.learned, 240, "three accepted verdicts and two versions learned from them")
    except AssertionError:
        pytest.fail(site.told())
    for program in site.programs.values():
        program.interrupt()
    for program in site.programs.values():
        program.wait(20)

    for name in ROLES:  # nobody wrote anywhere else
        key = site.made.keys[name].hex()
        assert {path.name for path in (site.directory / "buckets" / name).iterdir()} == {key}
        announced = (site.directory / "buckets" / "square" / "participants" / key).read_bytes()
        assert open_announced(announced, Announcement).record.space == f"{site.public}/{name}"

    # a stranger with nothing but the URL
    checked = grailnode("verify", "--run", manifest, "--set", "store.private_addresses=true", cwd=site.directory)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "holds: weights" in checked.stdout
    refused = grailnode("verify", "--run", manifest, cwd=site.directory)
    assert refused.returncode == 1
    assert "store.private_addresses = true allows it" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
