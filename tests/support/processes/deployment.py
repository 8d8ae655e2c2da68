"""The commands of docs/guide, carried out by a shell word for word, in their order.

On the pages of `DEPLOYMENT` a founder, a validator, a miner and anybody else have a directory each, and buckets of a
real S3 server.
`Deployment.replaced` has all that differs from the page: addresses of buckets and of a USB stick, and the public
beacon, which needs the internet, with its windows of a minute. `editor` writes credentials, as the reader does.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.support.processes.programs import ENVIRONMENT, PATIENCE, ROOT, Program, eventually, logged_events
from tests.support.processes.separate_buckets import AUTH_OPTIONS, PUBLIC_OPTIONS, write_credentials
from tests.support.servers.rclone import serving

Moments = Callable[[str], None]
"""Is told the name of each stage of a page when it is reached."""

GUIDE: Final = ROOT / "docs" / "guide"
BUCKETS: Final = {"founder": "", "judge": "2", "mine": "3"}
"""The bucket of each party, and the digit of its account on the page."""
STRANGERS_WINDOWS: Final = "--beacon own --window 5"

INSTALLATION: Final = ("apt-get ", "git clone ", "python3 -m venv ", "export PATH=")
DOCKER: Final = ("chown -R 10001:10001 run", "RUN=")
DEPLOYMENT: Final = {"founder.md": "founder", "validator.md": "judge", "miner.md": "mine"}
"""The pages from empty machines to a stranger's window, in the order in which they are followed, and who reads each."""
SERVERS: Final = ("grailnode dashboard", "eval ")
"""Commands of first-run.md that serve a page until Ctrl-C, or change the reader's shell."""


def commands_of(text: str) -> Iterator[str]:
    """Yield the commands of code blocks that name no other language, each in one line without its comment."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines() if not language else ():
            yield re.sub(r"\s+#.*", "", line)


def sections(page: str) -> dict[str, str]:
    """Return the text below each heading of a page of the guide."""
    text = (GUIDE / page).read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@dataclass
class Shell:
    """What a reader of a page has: a directory, in which a shell carries out commands and nodes run.

    Attributes:
        variables: of its environment, beside those of this process.
    """

    directory: Path
    programs: list[Program] = field(default_factory=list)

    def __post_init__(self) -> None:
        tools = self.directory / "bin"
        tools.mkdir(parents=True)
        credentials = tools / "credentials"
        write_credentials(credentials)
        for name, line in {
            "grailnode": f'exec {shlex.quote(sys.executable)} -m grailnode "$@"',
            "editor": f'cat {shlex.quote(str(credentials))} > "$1"',
        }.items():
            (tools / name).write_text(f"#!/bin/sh\n{line}\n")
            (tools / name).chmod(0o755)

    def run(self, line: str) -> str:
        """Carry out a line, and return what it prints."""
        environment = ENVIRONMENT | {
            "PATH": f"{self.directory / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(self.directory / ".cache"),
        }
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=self.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
            check=False,
        )
        assert result.returncode == 0, f"{line}\n{result.stdout}{result.stderr}"
        return result.stdout

    def start(self, line: str) -> None:
        """Start a node in the background."""
        log = self.directory / f"terminal-{len(self.programs)}"
        self.programs.append(Program(*shlex.split(line)[1:], log=log, cwd=self.directory))

    def end(self) -> None:
        for program in self.programs:
            program.end()


# docs/guide/first-run.md: a network of separate programs


def follow_first_run(directory: Path, moments: Moments) -> None:
    """Carry out "The same network as separate programs" in an empty directory. At the first verified window validator
    and miners end: the other commands read what is in storage, beside a trainer that waits.
    """
    shell, store = Shell(directory), directory / "my-run" / "store"
    try:
        for line in commands_of(sections("first-run.md")["The same network as separate programs"]):
            if line.startswith("grailnode --role"):
                shell.start(line)
                continue
            if line.startswith("grailnode status"):
                eventually(lambda: bool(verified_group(directory / "my-run", store)), "a verified window")
                moments("first verified window")
                for follower in shell.programs[1:]:
                    follower.end()
            if line.startswith(SERVERS):
                continue
            output = shell.run(line.replace("MINER/WINDOW/GROUP", verified_group(directory / "my-run", store)))
            assert output or line.startswith("grailnode chat"), line
            moments(line)
    finally:
        shell.end()


def verified_group(home: Path, store: Path) -> str:
    """Return MINER/WINDOW/GROUP of a group that a validator has accepted and revealed; empty if there is none."""
    for log in (home / "logs").glob("validator*.jsonl"):
        for verdict in reversed(logged_events(log, "verdict")):
            if verdict["accepted"] and list(store.glob(f"**/summaries/{verdict['window']:010d}")):
                return f"{verdict['miner']}/{verdict['window']}/0"
    return ""


# docs/guide/{founder,validator,miner}.md: each on a machine of its own


class Deployment:
    """The machines of all parties, and a service with a bucket for each.

    Args:
        endpoint: where buckets are written with credentials; public: where everybody reads them.

    Attributes:
        values: what the page's words in capitals stand for.
    """

    def __init__(self, directory: Path, endpoint: str, public: str) -> None:
        self.directory, self._endpoint, self._public = directory, endpoint, public
        self.shells = {name: Shell(directory / name) for name in (*BUCKETS, "anybody")}
        self.values: dict[str, str] = {}

    def home(self, owner: str) -> Path:
        return self.directory / owner / "run"

    def replaced(self, line: str) -> str:
        """Return a line of the page with the addresses of this machine, and a beacon of the run's own."""
        for bucket, digit in BUCKETS.items():
            line = line.replace(
                f"https://ACCOUNT{digit}.r2.cloudflarestorage.com/{bucket}", f"{self._endpoint}/{bucket}"
            )
            line = line.replace(f"https://pub-{bucket.upper()}.r2.dev", f"{self._public}/{bucket}")
        line = line.replace("--beacon quicknet", STRANGERS_WINDOWS).replace("/media/stick", str(self.directory))
        for name, value in self.values.items():
            line = re.sub(rf"\b{name}\b", value, line)
        return line

    def accepted(self) -> str:
        """Return a group of the miner that the validator has accepted and revealed, or an empty text."""
        return verified_group(self.home("judge"), self.directory / "buckets" / "judge")


@contextmanager
def make_deployment(directory: Path) -> Iterator[Deployment]:
    """Serve three empty buckets under a directory, and end all programs of the deployment afterwards."""
    buckets = directory / "buckets"
    for name in BUCKETS:
        (buckets / name).mkdir(parents=True)
    with serving(buckets, *AUTH_OPTIONS) as endpoint, serving(buckets, *PUBLIC_OPTIONS) as public:
        site = Deployment(directory, endpoint, public)
        try:
            yield site
        finally:
            for shell in site.shells.values():
                shell.end()


def follow_pages(site: Deployment, moments: Moments) -> None:
    """Carry out the pages of `DEPLOYMENT`, up to a window of a stranger that is verified and checked."""
    for page, reader in DEPLOYMENT.items():
        for section, text in sections(page).items():
            party = reader
            if section == "The first window, verified":
                eventually(lambda: bool(site.accepted()), "the validator accepts and reveals groups of the miner")
                site.values["MINER/WINDOW/GROUP"], party = site.accepted(), "anybody"
                moments("first verified window")
            for line in commands_of(text):
                if not line.startswith(INSTALLATION + DOCKER):
                    _carry_out(site, party, line, moments)
    moments("a stranger has verified it")


def _carry_out(site: Deployment, owner: str, line: str, moments: Moments) -> None:
    """Carry out a command, and what the page says that follows it. Some commands of a page are of another party."""
    if line.startswith(("grailnode admit", "grailnode keys grant", "grailnode keys quorum")):
        owner = "founder"
    elif line.startswith("grailnode keys new"):
        owner = "judge"
    shell, home = site.shells[owner], site.home(owner)
    if line.startswith("grailnode --role"):
        shell.start(site.replaced(line))
        if owner == "founder":
            rules = site.directory / "buckets" / "founder" / "runs" / site.values["ID"]
            eventually(rules.is_file, "the trainer publishes the rules")
        moments(f"{owner} started")
        return
    if line.startswith("grailnode keys grant"):  # another validator, which joins later
        site.values["PUBLICKEY"] = shell.run("grailnode keys new later.key").split()[-1]
    output = shell.run(site.replaced(line))
    if line.startswith("grailnode keys new"):
        site.values["PUBLICKEY"] = output.split()[-1]
    elif line.startswith("grailnode init") and owner == "founder":
        (site.values["ID"],) = re.findall(r"others join by \S+/(\w+)", output)
        for key in (home / "keys").glob("root-*.key"):
            key.rename(site.directory / key.name)
    elif line.startswith("grailnode init") and owner == "mine":
        site.values["PUBLICKEY"] = output.splitlines()[0].rpartition(" ")[2]
    elif line.startswith("grailnode admit"):
        (site.home("mine") / "keys" / "miner-1.invite").write_text(output)
        for name in ("s3", "meeting"):  # "as a validator does"
            file = f"run/{name}.credentials"
            site.shells["mine"].run(f"install -m 600 /dev/null {file} && editor {file}")
