"""The verbs whose options are rules of a run: `grailnode init`, `calibrate`, `evaluate` and `chat`."""

from typing import Final

import click

from grailnode.cli.from_model import options
from grailnode.cli.options import DIRECTORY, EXISTING_DIRECTORY, EXISTING_FILE, FILE, policy_options, shown_option, verb
from grailnode.run.rules import Place, Rules, TimingRules
from protocol import limits
from protocol.proof import CALIBRATED

_INIT_RULES: Final = [name for name in Rules.model_fields if name not in TimingRules.model_fields]
_REPEATED_RULES: Final = {
    "miner_arithmetics": "--miner-arithmetic",
    "validator_arithmetics": "--validator-arithmetic",
    "validator_keys": "--validator",
}


@verb("run_setup.init")
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
@options(Rules, _INIT_RULES, _REPEATED_RULES, lora_targets="NAMES", validator_keys="PUBLICKEY")
@options(Place, Place.model_fields, {"readers": "--reader"}, join="URL")
def init() -> None:
    """Make a run in DIRECTORY: a commented run.toml, its keys, and the signed manifest.

    With --bucket the run lives in a bucket of S3, and what the bucket needs (policies, CORS, lifecycle) is written to
    DIRECTORY/bucket, with the commands that apply it. With --join as well, DIRECTORY is for a node of somebody else's
    run.
    """


_CALIBRATION_RULES: Final = (
    *("environment", "environment_config", "data", "chat", "system_prompt", "max_tokens", "temperature"),
    *("turns", "turn_tokens", "reply_tokens", "episode_tokens", "lora_rank", "lora_alpha", "lora_targets"),
)


@verb("calibration_run.calibrate")
@click.option(
    "--policy", type=EXISTING_DIRECTORY, help="A Hugging Face checkpoint directory. Default: the packaged genesis."
)
@options(Rules, _CALIBRATION_RULES, lora_targets="NAMES")
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
    default=4.2,
    help="How many times more than the worst measured pair an honest machine may differ.",
)
@shown_option("--seed", type=click.IntRange(0), default=0, help="Seed of prompts, noise and projections.")
@click.option("--out", type=FILE, help="Where to write. Default: proof.json in --policy, or here for the packaged one.")
def calibrate() -> None:
    """Measure how far honest nodes differ on a policy; write the thresholds of the check to proof.json.

    The thresholds are those of one pair of arithmetics, --miner and --validator. A proof.json that is there already
    keeps the other pairs that were measured on the same policy, prompts and sampling.

    For a run of adapters the policy is their base, and both sides compute it with random adapters. Fails if a copy with
    4-bit weights cannot be distinguished from honest work.
    """


_ASKED_RULES: Final = (
    *("environment", "environment_config", "data", "chat", "system_prompt"),
    *("max_tokens", "turns", "turn_tokens", "reply_tokens", "episode_tokens", "temperature"),
)


def _numbers(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= limits.MAX_EVALUATION_SAMPLES for word in words):
        raise click.BadParameter(f"{text}: write numbers from 1 to {limits.MAX_EVALUATION_SAMPLES}, such as 1,8")
    return tuple(sorted({int(word) for word in words}))


@verb("policy_evaluation.evaluate")
@policy_options
@options(Rules, _ASKED_RULES)
@shown_option("--k", "attempts", default="1", metavar="K,K", callback=_numbers, help="Which pass@k.")
@shown_option(
    "--problems",
    type=click.IntRange(1, limits.MAX_EVALUATION_PROBLEMS),
    default=256,
    help="Held-out problems, as many as there are at most.",
)
@click.option(
    "--samples",
    type=click.IntRange(0, limits.MAX_EVALUATION_SAMPLES),
    help="Completions of each; 0: the most likely one. Default: the largest k, or 0 where that is 1.",
)
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def evaluate() -> None:
    """Measure pass@k on held-out problems, of the checkpoint in DIRECTORY or of a run's newest version (--run).

    Every number has its 95% interval. A run's version is verified, and asked as in the run: its task, chat template and
    sampling, with the noise that its validators use. --environment asks the problems of another task.
    """


@verb("policy_evaluation.chat")
@policy_options
@click.option("--message", help="Print the answer to this, and end.")
@click.option("--max-tokens", type=click.IntRange(1, limits.MAX_COMPLETION_TOKENS), help="Of an answer.")
@click.option("--greedy", is_flag=True, help="Take the most likely tokens. Default: sample.")
def chat() -> None:
    """Answer each line with the checkpoint in DIRECTORY, or with a run's newest version (--run), until Ctrl-D.

    A line is a conversation of its own, in the chat template of the run or of the checkpoint, if it has one. Newer
    versions of a run are fetched between two lines, and verified.
    """
