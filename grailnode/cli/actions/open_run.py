"""What several verbs share: the options that name a run, and lines for the operator."""

import io
import sys
from dataclasses import dataclass

import click

from grailnode.config import Config
from grailnode.run.joining import open_config, open_config_to_read


@dataclass(frozen=True)
class RunOptions:
    """The options that name a run by its run.toml or its manifest's URL."""

    run: str
    overrides: tuple[str, ...]
    trust_run: bool

    def open_config(self) -> Config:
        """Return the run's configuration; its manifest is a file."""
        return open_config(self.run, self.overrides, trust=report_line if self.trust_run else None)

    def open_config_to_read(self) -> Config:
        """Return the run's configuration for a verb that reads the run and is none of its nodes."""
        return open_config_to_read(self.run, self.overrides, trust=report_line if self.trust_run else None)


def report_line(line: str) -> None:
    """Print a line on standard error; a closed terminal or a full disk behind it must not stop a node.

    The stream is replaced after a failure: its buffer still has the line, and would fail again when the start of the
    next process flushes it.
    """
    try:
        click.echo(line, err=True)
    except (OSError, ValueError):
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), errors="backslashreplace", write_through=True)
