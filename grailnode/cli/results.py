"""`grailnode export`, `train`, `rollouts`, `publish` and `follow`: what goes into a run and comes out of it."""

import click

from grailnode.cli.options import DIRECTORY, EXISTING_DIRECTORY, FILE, run_options, shown_option, verb


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


@verb("rollout_listing.rollouts")
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


@verb("version_exchange.publish")
@click.argument("directory", type=EXISTING_DIRECTORY)
@click.option("--run", required=True, type=FILE, metavar="FILE", help="The run.toml of the run.")
@shown_option("--name", default="trainer", help="The trainer's name, whose key is in the run's keys/.")
@click.option("--step", required=True, type=click.IntRange(0), help="Optimizer steps up to this version.")
def publish() -> None:
    """Publish the checkpoint in DIRECTORY as the run's next version, and wait until it is in storage."""


@verb("version_exchange.follow")
@click.argument("run", metavar="FILE-or-URL")
@click.argument("directory", type=DIRECTORY)
@shown_option("--keep", type=click.IntRange(1), default=2, help="So many of the newest versions stay.")
@click.option("--once", is_flag=True, help="End after the first version.")
def follow() -> None:
    """Write each new version of a run to DIRECTORY, as VERSION.safetensors, verified, until Ctrl-C."""
