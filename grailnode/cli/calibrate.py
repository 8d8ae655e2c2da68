"""`grailnode calibrate`: measure how far honest nodes differ on a policy, and write the thresholds."""

from pathlib import Path
from typing import Any, Final

import click

from grailnode.cli.from_model import options
from grailnode.cli.options import run_action
from grailnode.run.rules import Rules
from protocol.proof import CALIBRATED

_RULES: Final = (
    *("environment", "data", "chat", "system_prompt", "max_tokens", "temperature"),
    *("lora_rank", "lora_alpha", "lora_targets"),
)


@click.command()
@click.option(
    "--policy",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A Hugging Face checkpoint directory. Default: the packaged genesis.",
)
@options(Rules, _RULES, lora_targets="NAMES")
@click.option(
    "--adapter-share",
    type=click.FloatRange(0.0, 1.0, min_open=True),
    default=0.05,
    show_default=True,
    help="With --lora-rank: by how much random adapters change their matrices.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help='Prompts instead of the environment\'s: JSON Lines, each {"prompt": "..."}.',
)
@click.option(
    "--rollouts", type=click.IntRange(1, 10_000_000), default=1000, show_default=True, help="Rollouts of each pair."
)
@click.option(
    "--miner", type=click.Choice(CALIBRATED), default="torch-float32", show_default=True, help="How miners compute."
)
@click.option(
    "--validator",
    type=click.Choice(CALIBRATED),
    default="torch-float32",
    show_default=True,
    help="How validators compute.",
)
@click.option("--pairs", default="run", show_default=True, help="Pairs of honest nodes: run for all, or names.")
@click.option(
    "--python",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The interpreter of vLLM's environment, to measure an arithmetic of vLLM.",
)
@click.option("--device", default="cpu", show_default=True, help="The device of torch and vLLM.")
@click.option(
    "--sketch",
    type=click.Choice(["projection", "topk"]),
    default="projection",
    show_default=True,
    help="The kind of sketch of a hidden state: docs/understand/proofs.md.",
)
@click.option(
    "--level",
    type=click.FloatRange(0.0, 0.1, min_open=True),
    default=1e-9,
    show_default=True,
    help="Probability with which one test may refuse honest work.",
)
@click.option(
    "--headroom",
    type=click.FloatRange(1.0),
    default=4.0,
    show_default=True,
    help="How many times more than the worst measured pair an honest machine may differ.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of prompts, noise and projections."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to write. Default: proof.json in --policy, or here for the packaged one.",
)
def calibrate(**parameters: Any) -> None:
    """Measure how far honest nodes differ on a policy; write the thresholds of the check to proof.json.

    The thresholds are those of one pair of arithmetics, --miner and --validator. A proof.json that is there already
    keeps the other pairs that were measured on the same policy, prompts and sampling.

    For a run of adapters the policy is their base, and both sides compute it with random adapters. Fails if a copy with
    4-bit weights cannot be distinguished from honest work.
    """
    run_action("calibration_run", "calibrate", parameters)
