"""The command line. Exit codes: 0 success, 1 failure (a line says why), 2 a wrong command line, 130 Ctrl-C.

A command's declaration is imported when that command is asked for, and what it does when it runs (`run_action`).
"""

import importlib
import sys
from dataclasses import dataclass
from typing import Any, Final, cast

import click

from grailnode.cli.options import run_action

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130

ROLES: Final = ("trainer", "worker", "miner", "validator")


@dataclass(frozen=True)
class Verb:
    """A command: the module of this package that defines it under its name, and the first sentence of its help."""

    module: str
    summary: str


VERBS: Final = {
    "admit": Verb(
        "admit",
        "Let KEY (64 hexadecimal digits) mine: list it, or print an invitation, as the run's admission policy asks.",
    ),
    "backup": Verb("state_verbs", "Copy the state of a stopped node into DIRECTORY, and check every object of it."),
    "calibrate": Verb(
        "calibrate", "Measure how far honest nodes differ on a policy; write the thresholds of the check to proof.json."
    ),
    "convert": Verb(
        "read", "Convert one weight update between our patches and TRL's and slime's layouts, bit for bit."
    ),
    "demo": Verb(
        "demo",
        "The whole network on this machine: 1 trainer, 2 miners, 1 validator and 1 cheat, as processes of their own.",
    ),
    "engine": Verb(
        "engine", "Install vLLM, print what a server of your own needs, or verify the weights in its memory."
    ),
    "export": Verb(
        "results",
        "Write a version's weights to DIRECTORY, as a Hugging Face checkpoint with a model card, bit for bit.",
    ),
    "init": Verb("init", "Make a run in DIRECTORY: a commented run.toml, its keys, and the signed manifest."),
    "inspect": Verb(
        "read", "Show what a patch FILE holds, tensor by tensor; with --base, beside the least bits there are to send."
    ),
    "keys": Verb("keys", "Make, show, grant, replace and revoke keys."),
    "repair": Verb(
        "state_verbs", "Rebuild what the state of a stopped node has lost, from storage and from what is left."
    ),
    "restore": Verb("state_verbs", "Copy the state of a node back from a backup in DIRECTORY."),
    "rollouts": Verb(
        "results", "Show what miners wrote in a window: prompt, completion, reward, and why validators rejected it."
    ),
    "status": Verb("read", "Print a run's head, windows, miners and scores, read from its store."),
    "train": Verb(
        "results",
        "Step a trainer's learner on the verified groups of a run, to try a loss; nothing is published.",
    ),
    "verify": Verb("read", "Check a run's chain from its oldest anchor to the head; exit 1 at the first lie."),
}


class LazyGroup(click.Group):
    """The group of all verbs, which imports a verb's module when that verb is asked for.

    `commands` has a placeholder for each verb, with the help that the list of commands shows.
    """

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None for an unknown name."""
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"grailnode.cli.{VERBS[cmd_name].module}")
        return cast(click.Command, getattr(module, cmd_name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the placeholders."""
        click.Group(commands=self.commands).format_commands(ctx, formatter)


@click.group(
    cls=LazyGroup,
    commands={name: click.Command(name, help=verb.summary) for name, verb in VERBS.items()},
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="grailnode")
@click.option("--role", type=click.Choice(ROLES), help="Run a node of this role until Ctrl-C.")
@click.option("--run", metavar="FILE-or-URL", help="The run.toml of the run, or the URL of its manifest (.../runs/ID).")
@click.option("--name", help="The node's name: its key and state. Default: the role (miner-1, worker-1).")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key of run.toml.")
@click.option("--trust-run", is_flag=True, help="Accept the run that a URL's server names, where no id is given.")
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
    """Run the console script. Every failure that the operator can repair is one line on standard error."""
    try:
        cli.main(prog_name="grailnode", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BaseException as error:
        line = importlib.import_module("grailnode.node.user_errors").explain(error)
        if line is None:
            raise
        if line:
            click.echo(f"grailnode: {line}", err=True)
            sys.exit(EXIT_FAILED)
        sys.exit(EXIT_INTERRUPTED)
