"""A run in which nobody shares a bucket: each writes with credentials to its own, and reads the others' as strangers
do.

One rclone serves the buckets with credentials, another serves them to read without any.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from grailnode.run.workspace import Workspace
from grailnode.store.s3.s3_session import S3Credentials
from tests.support.processes.programs import Program
from tests.support.servers.rclone import serving

CREDENTIALS: Final = S3Credentials("loopback-access", "loopback-secret")
SIGNED: Final = ("--auth-key", f"{CREDENTIALS.access_key},{CREDENTIALS.secret_key}")
PUBLIC: Final = ("--read-only", "--dir-cache-time", "0s")
MEETING: Final = "square"

_CONFIG = """
[run]
manifest = "{manifest}"

[store]
kind = "s3"
bucket = "{name}"
endpoint = "{endpoint}"
addressing = "path"
credentials = "s3.credentials"
url = "{public}/{name}"
private_addresses = true
{patience}

[store.meeting]
kind = "s3"
bucket = "square"
endpoint = "{endpoint}"
addressing = "path"
credentials = "s3.credentials"
{patience}

[beacon]
key = "{beacon}"
{settings}
"""


def make_buckets(directory: Path, names: Iterable[str]) -> None:
    """A bucket for each name, and one to meet in: to rclone, folders."""
    for name in (MEETING, *names):
        (directory / name).mkdir(parents=True)


@contextmanager
def serving_buckets(directory: Path, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """A bucket for each name and one to meet in, below a directory: the URLs to write to and to read from."""
    make_buckets(directory, names)
    with serving(directory, *SIGNED) as endpoint, serving(directory, *PUBLIC) as public:
        yield endpoint, public


class Machines:
    """One directory a machine, and the programs started there.

    Args:
        made: the founder's workspace, with everybody's keys.
        roles: by name of the participant; 'trainer' is among them.
        endpoint, public: where the machines write and read buckets.
        settings: what stands in everybody's run.toml besides; patience: in every section of a store.
        within: the command that starts commands where a machine is.
    """

    def __init__(
        self,
        directory: Path,
        made: Workspace,
        roles: Mapping[str, str],
        endpoint: str,
        public: str,
        *,
        settings: str = "",
        patience: str = "",
        within: Callable[[str], tuple[str, ...]] = lambda name: (),
    ) -> None:
        self.directory, self.made, self.roles, self.public = directory, made, roles, public
        self.programs: dict[str, Program] = {}
        self._within = within
        self._values = {"endpoint": endpoint, "public": public, "settings": settings, "patience": patience}
        for name in roles:
            self._machine(name)

    @property
    def manifest(self) -> str:
        """The URL at which the run's manifest is published."""
        return f"{self.public}/{MEETING}/runs/{self.made.run_id.hex()}"

    def _machine(self, name: str) -> None:
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
        if trainer:  # the founder has the manifest as a file; its node publishes it
            shutil.copy(self.made.directory / "run.manifest", home)
        manifest = "run.manifest" if trainer else self.manifest
        beacon = "beacon" if trainer else ""
        (home / "run.toml").write_text(_CONFIG.format(**self._values, name=name, manifest=manifest, beacon=beacon))

    def start(self, name: str) -> None:
        """Start a participant's node."""
        run = str(self.directory / name / "run.toml")
        log = self.directory / f"{name}.terminal"
        node = ("--role", self.roles[name], "--run", run, "--name", name)
        self.programs[name] = Program(*node, log=log, within=self._within(name))

    def end(self) -> None:
        """Leave no process behind."""
        for program in self.programs.values():
            program.end()

    def events(self, name: str, process: str, event: str) -> list[dict[str, Any]]:
        """What a process has logged; a line that a kill cut short is none."""
        file = self.directory / name / "logs" / f"{process}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [item for item in found if item["event"] == event]

    def told(self) -> str:
        """The ends of what the nodes have said on their terminals."""
        return "\n".join(f"--- {file.stem}\n{file.read_text()[-3000:]}" for file in self.directory.glob("*.terminal"))
