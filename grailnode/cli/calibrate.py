"""`grailnode calibrate`: measure how far honest nodes differ on a policy, and write the thresholds."""

from typing import Any, Final

import click

from grailnode.cli.from_model import options
from grailnode.cli.options import EXISTING_DIRECTORY, EXISTING_FILE, FILE, run_action, shown_option
from grailnode.run.rules import Rules
from protocol.proof import CALIBRATED

_RULES: Final = (
    *("environment", "environment_config", "data", "chat", "system_prompt", "max_tokens", "temperature"),
    *("turns", "turn_tokens", "reply_tokens", "episode_tokens", "lora_rank", "lora_alpha", "lora_targets"),
)


@click.command()
@click.option(
    "--policy", type=EXISTING_DIRECTORY, help="A Hugging Face checkpoint directory. Default: the packaged genesis."
)
@options(Rules, _RULES, lora_targets="NAMES")
@shown_option(
    "--adapter-share",
    type=click.FloatRange(0.0, 1.0, min_open=True),
    default=0.05,
    help="With --lora-rank: by how much random adapters change their matrices.",
)
@click.option(
    "--prompts", type=EXISTING_FILE, help='Prompts instead of the environment\'s: JSON Lines, each {"prompt": "..."}.'
)
@shown_option("--rollouts", type=click.IntRange(1, 10_000_000), default=1000, help="Rollouts of each pair.")
@shown_option("--miner", type=click.Choice(CALIBRATED), default="torch-float32", help="How miners compute.")
@shown_option("--validator", type=click.Choice(CALIBRATED), default="torch-float32", help="How validators compute.")
@shown_option("--pairs", default="run", help="Pairs of honest nodes: run for all, or names.")
@click.option(
    "--python",
    type=FILE,
    help="For an arithmetic of vLLM: its environment's interpreter. Default: that of `grailnode engine install`.",
)
@shown_option("--device", default="cpu", help="The device of torch and vLLM.")
@shown_option(
    "--sketch",
    type=click.Choice(["projection", "topk"]),
    default="projection",
    help="The kind of sketch of a hidden state: docs/understand/proofs.md.",
)
@shown_option(
    "--level",
    type=click.FloatRange(0.0, 0.1, min_open=True),
    default=1e-8,
    help="Honest work is refused within N groups with a probability of at most N times this.",
)
@shown_option(
    "--headroom",
    type=click.FloatRange(1.0),
    default=4.0,
    help="How many times more than the worst measured pair an honest machine may differ.",
)
@shown_option("--seed", type=click.IntRange(0), default=0, help="Seed of prompts, noise and projections.")
@click.option("--out", type=FILE, help="Where to write. Default: proof.json in --policy, or here for the packaged one.")
def calibrate(**parameters: Any) -> None:
    """Measure how far honest nodes differ on a policy; write the thresholds of the check to proof.json.

    The thresholds are those of one pair of arithmetics, --miner and --validator. A proof.json that is there already
    keeps the other pairs that were measured on the same policy, prompts and sampling.

    For a run of adapters the policy is their base, and both sides compute it with random adapters. Fails if a copy with
    4-bit weights cannot be distinguished from honest work.
    """
    run_action("calibration_run", "calibrate", parameters)
