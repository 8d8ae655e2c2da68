"""docs/guide/deploy.md, carried out: its commands, in order, for a founder, a validator and a miner with a home each.

The buckets of the three are served by a real S3 server on loopback. What differs from the page is in `replaced` alone:
the addresses of buckets, directories, the public beacon (there is no internet here), and the length of a window.
"""

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.support.processes.command_line import run_command
from tests.support.processes.programs import ROOT, Program, eventually, logged_events
from tests.support.processes.separate_buckets import AUTH_OPTIONS, PUBLIC_OPTIONS, write_credentials
from tests.support.servers.rclone import serving

Moments = Callable[[str], None]
"""Is told the name of each stage of the page when it is reached."""

PAGE: Final = (ROOT / "docs" / "guide" / "deploy.md").read_text(encoding="utf-8")
OWNERS: Final = {"founder": "", "judge": "2", "mine": "3"}
"""The bucket of each party, and the digit of its account on the page."""

NOT_CARRIED_OUT: Final = (
    "grailnode calibrate --policy /srv/policy",
    "grailnode engine install",
    "grailnode calibrate --policy DIR --miner vllm-bfloat16 --validator vllm-bfloat16 --device cuda",
    "grailnode engine flags POLICY",
)
"""For a policy of one's own, and for a machine with a GPU."""


def commands_of(page: str) -> list[str]:
    """Return the `grailnode` commands of a page's code blocks in order, each in one line without its comment."""
    blocks = re.findall(r"^```\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+#.*", "", line) for line in lines if line.startswith("grailnode ")]


@dataclass
class Deployment:
    """What the page's reader has: three homes, and a service with a bucket for each party.

    Attributes:
        endpoint: where buckets are written with credentials; public: where everybody reads them.
        values: what the page's words in capitals stand for.
        open_commands: the commands of the page that were not carried out yet.
    """

    directory: Path
    endpoint: str
    public: str
    values: dict[str, str] = field(default_factory=dict)
    programs: list[Program] = field(default_factory=list)
    open_commands: list[str] = field(default_factory=lambda: commands_of(PAGE))

    def home(self, owner: str) -> Path:
        return self.directory / owner

    def command(self, owner: str, beginning: str) -> list[str]:
        """Return the arguments of the page's first open command that begins so, for a party and its machine."""
        line = next(line for line in self.open_commands if line.startswith(beginning))
        self.open_commands.remove(line)
        return shlex.split(self.replaced(owner, line))[1:]

    def replaced(self, owner: str, line: str) -> str:
        """Return a line of the page with the addresses, directories and keys of this test."""
        reads = "--run https://pub" in line
        for bucket, digit in OWNERS.items():
            line = line.replace(
                f"https://ACCOUNT{digit}.r2.cloudflarestorage.com/{bucket}", f"{self.endpoint}/{bucket}"
            )
            line = line.replace(f"https://pub-{bucket.upper()}.r2.dev", f"{self.public}/{bucket}")
        line = line.replace("--provider r2", "--provider minio").replace("--beacon quicknet", "--beacon own")
        line = line.replace("--window 60", "--window 5").replace("/srv/run", str(self.home(owner)))
        line = line.replace("/media/stick", str(self.directory / "stick"))
        if reads:
            line += " --set store.private_addresses=true"  # the buckets are served on this machine
        for name, value in self.values.items():
            line = re.sub(rf"\b{name}\b", value, line)
        return line

    def run(self, owner: str, beginning: str) -> str:
        """Carry out a command of the page, and return what it prints."""
        result = run_command(*self.command(owner, beginning))
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def start(self, owner: str, beginning: str) -> Program:
        """Start a node as the page says."""
        log = self.home(owner) / "terminal"
        program = Program(*self.command(owner, beginning), log=log)
        self.programs.append(program)
        return program

    def store_credentials(self, owner: str, *names: str) -> None:
        for name in names:
            write_credentials(self.home(owner) / name)


@contextmanager
def make_deployment(directory: Path) -> Iterator[Deployment]:
    """Serve three empty buckets under a directory, and end all programs of the deployment afterwards."""
    buckets = directory / "buckets"
    for name in OWNERS:
        (buckets / name).mkdir(parents=True)
        (directory / name / "keys").mkdir(parents=True)
    with serving(buckets, *AUTH_OPTIONS) as endpoint, serving(buckets, *PUBLIC_OPTIONS) as public:
        site = Deployment(directory, endpoint, public)
        try:
            yield site
        finally:
            for program in site.programs:
                program.end()


def follow_page(site: Deployment, moments: Moments) -> None:
    """Carry out the whole page, up to a window of a stranger that is verified and checked."""
    founder, judge, mine = site.home("founder"), site.home("judge"), site.home("mine")

    validator = site.run("judge", "grailnode keys new").split()[-1]
    site.values["PUBLICKEY"] = validator
    (founder / "keys").rmdir()
    init_output = site.run("founder", "grailnode init /srv/run --bucket https://ACCOUNT.")
    url = re.search(r"others join by (\S+)", init_output)
    assert url is not None
    site.values["ID"] = url[1].rpartition("/")[2]
    site.store_credentials("founder", "s3.credentials")
    stick = site.directory / "stick"
    stick.mkdir()
    for key in sorted((founder / "keys").glob("root-*.key")):
        key.rename(stick / key.name)
    moments("run created")

    site.start("founder", "grailnode --role trainer")
    rules = site.directory / "buckets" / "founder" / "runs" / site.values["ID"]
    eventually(rules.is_file, "the trainer publishes the rules")
    moments("trainer publishes the rules")
    site.run("founder", "grailnode status")

    site.run("judge", "grailnode init /srv/run --bucket https://ACCOUNT2.")
    site.store_credentials("judge", "s3.credentials", "meeting.credentials")
    site.start("judge", "grailnode --role validator --run /srv/run/run.toml --name validator-2")
    moments("validator joined and started")

    init_output = site.run("mine", "grailnode init /srv/run --bucket https://ACCOUNT3.")
    site.values["PUBLICKEY"] = init_output.splitlines()[0].rpartition(" ")[2]
    result = run_command(*site.command("founder", "grailnode admit"))
    assert result.returncode == 0, result.stderr
    (mine / "keys" / "miner-1.invite").write_text(result.stdout)
    site.store_credentials("mine", "s3.credentials", "meeting.credentials")
    site.start("mine", "grailnode --role miner")
    moments("miner admitted and started")

    eventually(lambda: bool(accepted_windows(judge)), "the validator accepts groups of the miner")
    window = accepted_windows(judge)[0]
    revealed = site.directory / "buckets" / "judge" / validator / "summaries" / f"{window:010d}"
    eventually(revealed.is_file, "the validator reveals that window")
    moments("first verified window")
    assert "my-run" in site.run("mine", "grailnode status")
    assert "holds: weights" in site.run("mine", "grailnode verify")
    site.run("mine", "grailnode verify")
    site.values["MINER/WINDOW/GROUP"] = f"{site.values['PUBLICKEY']}/{window}/0"
    site.run("mine", "grailnode verify")
    moments("a stranger has verified it")

    later = site.directory / "later.key"
    site.values["PUBLICKEY"] = run_command("keys", "new", str(later)).stdout.split()[-1]
    site.run("founder", "grailnode keys grant")
    site.run("founder", "grailnode keys quorum")
    assert site.open_commands == list(NOT_CARRIED_OUT)
    moments("roots changed")


def accepted_windows(home: Path) -> list[int]:
    """Return the windows in which a validator accepted groups of a miner, by its log."""
    verdicts = logged_events(home / "logs" / "validator-2.jsonl", "verdict")
    return [verdict["window"] for verdict in verdicts if verdict["accepted"]]
