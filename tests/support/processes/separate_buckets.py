"""A run whose participants share no bucket: each writes to its own with credentials, and reads the others' without.

One rclone serves the buckets with credentials, another serves them to read without any.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from grailnode.run.workspace import Workspace
from grailnode.store.s3.s3_session import S3Credentials
from tests.support.processes.programs import ROOT, Program, logged_events
from tests.support.servers.rclone import serving

CREDENTIALS: Final = S3Credentials("loopback-access", "loopback-secret")
AUTH_OPTIONS: Final = ("--auth-key", f"{CREDENTIALS.access_key},{CREDENTIALS.secret_key}")
PUBLIC_OPTIONS: Final = ("--read-only", "--dir-cache-time", "0s")
MEETING_BUCKET: Final = "square"

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
    """Make a bucket for each name, and one for the meeting point; rclone serves folders as buckets."""
    for name in (MEETING_BUCKET, *names):
        (directory / name).mkdir(parents=True)


def write_credentials(file: Path) -> None:
    """Write a file of credentials, as an operator does with `install` and an editor."""
    file.touch(0o600)
    file.write_text(
        f"[default]\naws_access_key_id={CREDENTIALS.access_key}\naws_secret_access_key={CREDENTIALS.secret_key}\n"
    )


@contextmanager
def serving_buckets(directory: Path, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Serve a bucket for each name and the meeting point; yield the URLs for writing and for reading."""
    make_buckets(directory, names)
    with serving(directory, *AUTH_OPTIONS) as endpoint, serving(directory, *PUBLIC_OPTIONS) as public:
        yield endpoint, public


class Machines:
    """One directory for each machine, and the programs on it.

    Args:
        workspace: the founder's workspace, with the keys of all participants.
        roles: by name of the participant; 'trainer' is among them.
        endpoint, public: URLs at which the machines write and read buckets.
        settings: further lines of every run.toml.
        patience: further lines of every section of a store.
        within: the command that starts a program on a machine.
    """

    def __init__(
        self,
        directory: Path,
        workspace: Workspace,
        roles: Mapping[str, str],
        endpoint: str,
        public: str,
        *,
        settings: str = "",
        patience: str = "",
        within: Callable[[str], tuple[str, ...]] = lambda name: (),
    ) -> None:
        self.directory, self.workspace, self.roles, self.public = directory, workspace, roles, public
        self.programs: dict[str, Program] = {}
        self._within = within
        self._values = {"endpoint": endpoint, "public": public, "settings": settings, "patience": patience}
        for name in roles:
            self._machine(name)

    @property
    def manifest(self) -> str:
        """The URL at which the run's manifest is published."""
        return f"{self.public}/{MEETING_BUCKET}/runs/{self.workspace.run_id.hex()}"

    def _machine(self, name: str) -> None:
        """Write one participant's directory: its key, its credentials and its run.toml."""
        home = self.directory / name
        (home / "keys").mkdir(parents=True)
        trainer = name == "trainer"
        for key in (name, "beacon") if trainer else (name,):
            shutil.copy(self.workspace.directory / "keys" / f"{key}.key", home / "keys")
        write_credentials(home / "s3.credentials")
        if trainer:  # the founder has the manifest as a file; its node publishes it
            shutil.copy(self.workspace.directory / "run.manifest", home)
        manifest = "run.manifest" if trainer else self.manifest
        beacon = "beacon" if trainer else ""
        (home / "run.toml").write_text(_CONFIG.format(**self._values, name=name, manifest=manifest, beacon=beacon))

    def start(self, name: str) -> None:
        run = str(self.directory / name / "run.toml")
        log = self.directory / f"{name}.terminal"
        node = ("--role", self.roles[name], "--run", run, "--name", name)
        self.programs[name] = Program(*node, log=log, within=self._within(name))

    def start_hostile(self, kind: str, name: str, *keys: str) -> None:
        """Start a site of a kind of tests/support/adversaries/hostile_sites.py."""
        node = (kind, str(self.directory / name / "run.toml"), name, *keys)
        log, module = self.directory / f"{name}.terminal", "tests.support.adversaries.hostile_sites"
        self.programs[name] = Program(*node, log=log, within=self._within(name), cwd=ROOT, module=module)

    def end(self) -> None:
        for program in self.programs.values():
            program.end()

    def events(self, name: str, process: str, event: str) -> list[dict[str, Any]]:
        """Return the events of a name that a process has logged."""
        return logged_events(self.directory / name / "logs" / f"{process}.jsonl", event)

    def terminal_output(self) -> str:
        """Return the ends of the nodes' terminal output."""
        return "\n".join(f"--- {file.stem}\n{file.read_text()[-3000:]}" for file in self.directory.glob("*.terminal"))
