"""`grailnode init`: make a run, or a directory for a node of somebody else's run."""

from typing import Any, Final

import click

from grailnode.cli.from_model import options
from grailnode.cli.options import DIRECTORY, EXISTING_DIRECTORY, FILE, run_action
from grailnode.run.rules import Place, Rules, TimingRules

_RULES: Final = [name for name in Rules.model_fields if name not in TimingRules.model_fields]
_REPEATED_RULES: Final = {
    "miner_arithmetics": "--miner-arithmetic",
    "validator_arithmetics": "--validator-arithmetic",
    "validator_keys": "--validator",
}


@click.command()
@click.argument("directory", type=DIRECTORY)
@click.option(
    "--policy", type=EXISTING_DIRECTORY, help="A Hugging Face checkpoint directory. Default: the packaged genesis."
)
@click.option(
    "--recipe",
    type=FILE,
    help="TOML file with the run's constants: docs/guide/own-task.md. Options of this command line replace its rules.",
)
@click.option(
    "--proof",
    type=FILE,
    help="Thresholds that `grailnode calibrate` measured. Default: proof.json in the policy's directory.",
)
@options(Rules, _RULES, _REPEATED_RULES, lora_targets="NAMES", validator_keys="PUBLICKEY")
@options(Place, Place.model_fields, {"readers": "--reader"}, join="URL")
def init(**parameters: Any) -> None:
    """Make a run in DIRECTORY: a commented run.toml, its keys, and the signed manifest.

    With --bucket the run lives in a bucket of S3, and what the bucket needs (policies, CORS, lifecycle) is written to
    DIRECTORY/bucket, with the commands that apply it. With --join as well, DIRECTORY is for a node of somebody else's
    run.
    """
    run_action("run_setup", "init", parameters)
