"""What the declarations of several verbs share: options, the check of a node's name, and how a verb is run."""

import importlib
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final, TypedDict

import click

EXIT_INTERRUPTED: Final = 130


FILE: Final = click.Path(dir_okay=False, path_type=Path)
DIRECTORY: Final = click.Path(file_okay=False, path_type=Path)
EXISTING_FILE: Final = click.Path(dir_okay=False, exists=True, path_type=Path)
EXISTING_DIRECTORY: Final = click.Path(file_okay=False, exists=True, path_type=Path)

shown_option: Final = partial(click.option, show_default=True)
"""An option whose help shows its default."""

_node_name: Final = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,32}")


def run_action(module: str, verb: str, parameters: Mapping[str, Any]) -> None:
    """Run what a verb does: the function of its name in a module of grailnode/cli/actions.

    The run that the command line names is read first, for errors in that.

    The module is imported here and no earlier: most of them import torch, which takes seconds, and neither the help of
    a verb nor an error in its command line should wait for that. Ctrl-C ends the program at once meanwhile: numpy
    cannot be imported again after an interruption, not even for what would report that.
    """
    is_main = threading.current_thread() is threading.main_thread()  # no other thread may handle signals
    handler = signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED)) if is_main else None
    try:
        if (run := parameters.get("run")) is not None:
            read_config = importlib.import_module("grailnode.run.run_option").read_config
            read_config(str(run), parameters.get("overrides", ()), trusts=parameters.get("trust") is not None)
        action = getattr(importlib.import_module(f"grailnode.cli.actions.{module}"), verb)
    finally:
        if is_main:
            signal.signal(signal.SIGINT, handler)
    action(**parameters)


def verb(action: str, group: click.Group | None = None) -> Callable[[Callable[[], None]], click.Command]:
    """Return a decorator that makes a command with a function's name, docstring and options, or a subcommand of a
    group. It runs an action, 'MODULE.FUNCTION' as for `run_action`.
    """
    module, _, name = action.partition(".")

    def declare(function: Callable[[], None]) -> click.Command:
        @wraps(function)
        def run(**parameters: Any) -> None:

            run_action(module, name, parameters)

        return (click.command if group is None else group.command)(name.rstrip("_"))(run)

    return declare


class RunOptions(TypedDict):
    """The options that name a run, as `joining.open_config` takes them."""

    run: str
    overrides: tuple[str, ...]
    trust: Callable[[str], None] | None


class PolicyOptions(TypedDict):
    """The options that name a policy: a checkpoint's directory, or the options of a run."""

    directory: Path | None
    run: str | None
    overrides: tuple[str, ...]
    trust: Callable[[str], None] | None


def trust_option(text: str) -> Callable[..., Any]:
    """Return the option that accepts a server's word for which run it has, and reports that in a line."""
    return click.option(
        "--trust-run", "trust", is_flag=True, callback=lambda *values: report_line if values[-1] else None, help=text
    )


def run_options(function: Callable[..., Any], *, is_required: bool = True) -> Callable[..., Any]:
    run_help = "The run.toml, or the manifest's URL."
    for option in (
        trust_option("Accept the run that a URL's server names."),
        click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key."),
        click.option("--run", required=is_required, metavar="FILE-or-URL", help=run_help),
    ):
        function = option(function)
    return function


optional_run_options: Final = partial(run_options, is_required=False)


def policy_options(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("directory", type=EXISTING_DIRECTORY, required=False)(optional_run_options(function))


def authority_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option that names a run whose authority a command changes."""
    return click.option("--run", required=True, metavar="FILE", help="The run.toml of the run.")(function)


def usual_name(role: str) -> str:
    """Return the name of the first node of a role."""
    return f"{role}-1" if role in ("miner", "worker") else role


def check_name(name: str) -> None:
    """Raise UsageError for a text that cannot be a node's name."""
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
