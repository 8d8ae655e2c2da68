"""What several verbs share: the options that name a run, the check of a node's name, and lines for the operator."""

import io
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import click

from grailnode.config import Config
from grailnode.run.joining import open_config

_node_name: Final = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,32}")


@dataclass(frozen=True)
class RunOptions:
    """The options that name a run by its run.toml or its manifest's URL."""

    run: str
    overrides: tuple[str, ...]
    trust_run: bool

    def open_config(self) -> Config:
        """Return the run's configuration; its manifest is a file.

        Raises:
            ConfigError, StoreError, ProtocolError: as `joining.open_config`.
        """
        return open_config(self.run, self.overrides, trust=report_line if self.trust_run else None)


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `RunOptions` to a command."""
    for option in (
        click.option("--trust-run", is_flag=True, help="Accept the run that a URL's server names."),
        click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key."),
        click.option("--run", required=True, metavar="FILE-or-URL", help="The run.toml, or the manifest's URL."),
    ):
        function = option(function)
    return function


def check_name(name: str) -> None:
    """Refuse a text that cannot be a node's name.

    Raises:
        UsageError: it cannot.
    """
    if not _node_name.fullmatch(name):
        raise click.UsageError(
            f"--name {name}: up to 32 letters, digits, '_', '.' and '-', the first no '.', "
            "which announcements and file names carry"
        )


def report_line(line: str) -> None:
    """Print a line on standard error; a closed terminal or a full disk behind it must not stop a node.

    The stream is replaced after a failure: its buffer still has the line, and would fail again when the start of the
    next process flushes it.
    """
    try:
        click.echo(line, err=True)
    except (OSError, ValueError):
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), errors="backslashreplace", write_through=True)
