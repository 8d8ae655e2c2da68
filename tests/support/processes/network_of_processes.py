"""A run's directory, and its trainer, validators and miners as real processes over it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grailnode.run import workspace
from grailnode.run.rules import Rules
from grailnode.run.run_toml import Recipe
from tests.support.builders.recipes import demo_rules
from tests.support.processes.programs import Program, eventually, logged_events, members

RULES = demo_rules(group_size=8, groups=6, evaluation_problems=16, deposit=0.0)
SECTIONS = {"trainer": {"groups_per_step": 4, "anchor_interval": 5}, "miner": {"groups": 6}}


class NetworkOfProcesses:
    """A run's directory, and the programs on it.

    Attributes:
        workspace: the run's directory.
        programs: the started programs by name.
    """

    def __init__(self, directory: Path, rules: Rules = RULES) -> None:
        recipe = Recipe.model_validate({**SECTIONS, "rules": rules})
        self.workspace = workspace.create(directory, recipe)
        self.programs: dict[str, Program] = {}

    def start(self, role: str, name: str, *options: str, terminal: Path | None = None) -> Program:
        """Start a node's program with other options of the command line; its terminal is a file, or another one."""
        log = terminal or self.workspace.directory / f"{name}.terminal"
        program = Program("--role", role, "--run", str(self.workspace.config), "--name", name, *options, log=log)
        self.programs[name] = program
        return program

    def events(self, process: str, event: str) -> list[dict[str, Any]]:
        """Return the events of a name that a process has logged."""
        return logged_events(self.workspace.directory / "logs" / f"{process}.jsonl", event)

    def values(self, names: Iterable[str], event: str, number: str, value: str) -> dict[int, set[Any]]:
        """Return the values that events of some processes name, by the number that they name with them."""
        values: dict[int, set[Any]] = {}
        for name in names:
            for fields in self.events(name, event):
                values.setdefault(fields[number], set()).add(fields[value])
        return values

    def newest_version(self) -> int:
        """Return the newest published version, or -1."""
        events = (*self.events("trainer-upload", "published"), *self.events("trainer-coordinator", "published"))
        return max((event["version"] for event in events), default=-1)

    def progress(self) -> tuple[int, int]:
        """Return the newest version and the number of verdicts."""
        return self.newest_version(), len(self.events("validator", "verdict"))

    def is_beyond(self, before: tuple[int, int]) -> bool:
        """Return whether there are two more versions and another verdict."""
        version, verdicts = self.progress()
        return version >= before[0] + 2 and verdicts > before[1]

    def stop(self, *names: str) -> None:
        """Interrupt programs, all of them without names, and wait until none of their processes is alive."""
        programs = [self.programs[name] for name in names or self.programs]
        for program in programs:
            program.interrupt()
        for program in programs:
            program.wait()
            wait_until_gone(program)

    def end(self) -> None:
        """Kill all processes."""
        for program in self.programs.values():
            program.end()


def wait_until_gone(program: Program) -> None:
    """Wait until no process of a program is alive."""
    eventually(lambda: not members(program.session), f"no process of {program.log.stem} is left")
