"""The verbs that read a run or a file, and change neither, and those of what goes into a run and comes out of it."""

from pathlib import Path
from typing import Final

import click

from grailnode.cli.options import DIRECTORY, EXISTING_DIRECTORY, EXISTING_FILE, FILE, run_options, shown_option, verb

_FORMATS: Final = click.Choice(["grailnode", "trl", "slime", "safetensors"])


@verb("run_reading.status")
@run_options
@click.option("--json", "as_json", is_flag=True, help="For scripts; with --watch a line each time.")
@click.option("--watch", is_flag=True, help="Again and again, 20 times a window, until Ctrl-C.")
def status() -> None:
    """Print a run's head, windows, miners and scores, read from its store."""


@verb("run_dashboard.dashboard")
@run_options
@shown_option("--port", type=click.IntRange(1, 65535), default=8642, help="Where the page is served.")
@shown_option("--host", default="127.0.0.1", help="Its address; another than this shows the page to others.")
@click.option("--local", is_flag=True, help="With what the logs of this machine's nodes say; not behind a proxy.")
def dashboard() -> None:
    """Serve a live page of a run, read from its store: windows, curves, miners, validators, rollouts."""


@verb("run_reading.verify")
@run_options
@click.option("--rollout", metavar="MINER/WINDOW/GROUP", help="Judge one group again, and show every statistic.")
@click.option("--ledger", is_flag=True, help="Check every validator's summaries against its verdicts, and its scores.")
def verify() -> None:
    """Check a run's chain from its oldest anchor to the head; exit 1 at the first lie."""


@verb("run_reading.inspect")
@click.argument("file", type=EXISTING_FILE)
@click.option("--base", type=EXISTING_FILE, help="The weights it applies to.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@click.option("--all", "everything", is_flag=True, help="Unchanged tensors as well.")
def inspect() -> None:
    """Show what a patch FILE holds; with --base, tensor by tensor, beside the least bits there are to send."""


@verb("run_reading.convert")
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--from", "source_format", type=_FORMATS, required=True, help="The format of SOURCE.")
@click.option("--to", "out_format", type=_FORMATS, required=True, help="The format to write to OUT.")
@click.option("--base", type=EXISTING_FILE, help="Safetensors file of the weights before; none for a full checkpoint.")
@shown_option("--version", type=click.IntRange(0), default=1, help="Version to write.")
@shown_option("--base-version", type=click.IntRange(0), default=0, help="Version of --base.")
def convert() -> None:
    """Convert one weight update between our patches and TRL's and slime's layouts, bit for bit."""


@verb("node_start.mirror")
@run_options
@click.option(
    "--to", required=True, metavar="DIR-or-BUCKET", help="A directory, s3://NAME/PREFIX or https://ENDPOINT/NAME."
)
@click.option(
    "--region", default="", help="Of the bucket; its credentials are AWS_ACCESS_KEY_ID and _SECRET_ACCESS_KEY."
)
def mirror() -> None:
    """Copy what followers read of the run's trainers, and keep the copy up to date until Ctrl-C.

    Serve the copy by HTTPS, and let the founder run `grailnode keys mirrors URL...`: then nodes read from it, too.
    """


@verb("model_export.export")
@click.argument("directory", type=DIRECTORY)
@run_options
@click.option("--version", type=click.IntRange(0), help="Which version. Default: the newest.")
@click.option("--merged", is_flag=True, help="Add the adapters of a LoRA run to its base: a whole model.")
def export() -> None:
    """Write a version's weights to DIRECTORY, as a Hugging Face checkpoint with a model card, bit for bit.

    The version of a LoRA run is written as PEFT reads adapters.
    """


@verb("offline_training.train")
@run_options
@click.option("--offline", is_flag=True, help="Learn from groups that storage has, and publish nothing.")
@click.option(
    "--policy",
    type=EXISTING_DIRECTORY,
    help="Where to begin, such as an exported version. Default: the policy of run.toml.",
)
@click.option("--first", "first_window", type=click.IntRange(0), help="The first window. Default: 50 before the last.")
@click.option("--last", "last_window", type=click.IntRange(0), help="The last window. Default: the newest judged one.")
@shown_option("--steps", type=click.IntRange(0), default=0, help="At most so many; 0 for all.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def train() -> None:
    """Step a trainer's learner on the verified groups of a run, to try a loss; nothing is published."""


@verb("run_reading.rollouts")
@run_options
@click.option("--window", type=click.IntRange(0), help="Which window. Default: the newest judged one that has any.")
@click.option(
    "--miner", default="", metavar="MINER", help="Only this miner's: its name, its key, or the beginning of that."
)
@click.option("--best", is_flag=True, help="The highest rewards first.")
@click.option("--worst", is_flag=True, help="The lowest rewards first.")
@click.option("--rejected", is_flag=True, help="Only those that a validator rejected.")
@shown_option("--count", type=click.IntRange(0), default=10, help="At most so many; 0 for all.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def rollouts() -> None:
    """Show what miners wrote in a window: prompt, completion, reward, and why validators rejected it."""


@verb("model_export.publish")
@click.argument("directory", type=EXISTING_DIRECTORY)
@click.option("--run", required=True, type=FILE, metavar="FILE", help="The run.toml of the run.")
@shown_option("--name", default="trainer", help="The trainer's name, whose key is in the run's keys/.")
@click.option("--step", required=True, type=click.IntRange(0), help="Optimizer steps up to this version.")
def publish() -> None:
    """Publish the checkpoint in DIRECTORY as the run's next version, and wait until it is in storage."""


@verb("model_export.follow")
@click.argument("run", metavar="FILE-or-URL")
@click.argument("directory", type=DIRECTORY)
@shown_option("--keep", type=click.IntRange(1), default=2, help="So many of the newest versions stay.")
@click.option("--once", is_flag=True, help="End after the first version.")
def follow() -> None:
    """Write each new version of a run to DIRECTORY, as VERSION.safetensors, verified, until Ctrl-C."""
