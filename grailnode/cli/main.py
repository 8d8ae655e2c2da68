"""The command line. Exit codes: 0 success, 1 failure (a line says why), 2 a wrong command line, 130 Ctrl-C.

A command's declaration is imported when that command is asked for, and what it does when it runs (`run_action`).
"""

import importlib
import io
import sys
from itertools import pairwise
from typing import Any, Final, cast

import click

from grailnode import UserError
from grailnode.cli.options import EXIT_INTERRUPTED, run_action, trust_option

EXIT_FAILED: Final = 1


_VERBS_OF: Final = {
    "keys": ("admit", "keys"),
    "machine": ("backup", "demo", "doctor", "engine", "environments", "repair", "restore"),
    "rule_verbs": ("calibrate", "chat", "evaluate", "init"),
    "run_verbs": (
        *("convert", "dashboard", "export", "follow", "inspect", "mirror"),
        *("publish", "rollouts", "status", "train", "verify"),
    ),
}
VERBS: Final = dict(sorted((verb, module) for module, verbs in _VERBS_OF.items() for verb in verbs))
"""Each command, with the module of this package that defines it under its name."""


class LazyGroup(click.Group):
    """The group of all verbs, which imports a verb's module when that verb is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None for an unknown name."""
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"grailnode.cli.{VERBS[cmd_name]}")
        return cast(click.Command, getattr(module, cmd_name))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse an empty text, as an unset variable of a script gives it: a verb would take it for no filter, or for
        the current directory. An answer to try may be empty.
        """
        for before, text in pairwise(["an argument", *args]):
            name, has_value, value = text.partition("=") if text.startswith("--") else (before, "=", text)
            if has_value and not value and name != "--answer" and not ctx.resilient_parsing:
                raise click.UsageError(f"{name} is empty: give it a text, or leave it out", ctx)
        return super().parse_args(ctx, args)


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="grailnode")
@click.option(
    "--role",
    type=click.Choice(["trainer", "worker", "miner", "validator"]),
    help="Run a node of this role until Ctrl-C.",
)
@click.option("--run", metavar="FILE-or-URL", help="The run.toml of the run, or the URL of its manifest (.../runs/ID).")
@click.option("--name", help="The node's name: its key and state. Default: the role (miner-1, worker-1).")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key of run.toml.")
@trust_option("Accept the run that a URL's server names, where no id is given.")
@click.pass_context
def cli(context: click.Context, /, role: str | None, run: str | None, **parameters: Any) -> None:
    """Trainer, miner and validator for decentralized RL post-training.

    Start with `grailnode demo`: the whole network on this machine, in about three minutes.
    """
    if context.invoked_subcommand is not None:
        if role is not None:
            raise click.UsageError("give either --role or a command")
        return
    if role is None:
        click.echo(context.get_help())
        return
    if run is None:
        raise click.UsageError("--role needs --run FILE-or-URL; `grailnode init DIR` makes one")
    run_action("node_start", "run_node", {"role": role, "run": run, **parameters})


def main() -> None:
    """Run the console script. Every failure that the operator can repair is one line on standard error. Characters that
    the terminal cannot write become '?'.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        cli.main(prog_name="grailnode", standalone_mode=False)
    except SystemExit:  # completion has ended: shells wait for it, and what explains an error imports torch
        raise
    except click.exceptions.Abort:
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except UserError as error:
        click.echo(f"grailnode: {error}", err=True)
        sys.exit(EXIT_FAILED)
    except BaseException as error:
        line = importlib.import_module("grailnode.node.user_errors").explain(error)
        if line is None:
            raise
        if line:
            click.echo(f"grailnode: {line}", err=True)
            sys.exit(EXIT_FAILED)
        sys.exit(EXIT_INTERRUPTED)
