"""`grailnode init`: make a run, or a directory for a node of somebody else's run."""

from pathlib import Path
from typing import Any

import click

from grailnode.cli.options import chat_options, lora_options, run_action
from protocol.limits import (
    MAX_COMPLETION_TOKENS,
    MAX_EVALUATION_PROBLEMS,
    MAX_EVALUATION_SAMPLES,
    MAX_GROUP_SIZE,
    MAX_GROUPS,
    MAX_KEYS,
    MAX_WORKERS,
)
from protocol.proof import CALIBRATED

_WORK_BITS = 20  # the price of a miner's key of an open run: about a million hashes a day


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--title", help="What the run is called. Default: the directory's name.")
@click.option(
    "--policy",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A Hugging Face checkpoint directory. Default: the packaged genesis.",
)
@click.option(
    "--recipe",
    type=click.Path(path_type=Path, dir_okay=False),
    help="TOML file with the run's constants: docs/guide/own-task.md. Options of this command line replace its rules.",
)
@click.option("--environment", help="The task: docs/spec/environments.md. Default: addition.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSON Lines with the problems, for a task that reads them.",
)
@chat_options
@click.option(
    "--max-tokens", type=click.IntRange(1, MAX_COMPLETION_TOKENS), help="The longest completion. Default: the task's."
)
@click.option("--temperature", type=click.FloatRange(0, 100, min_open=True), help="Of sampling. Default: 1.")
@click.option("--top-k", type=click.IntRange(0), help="Sample from the k most likely tokens. Default: 0, from all.")
@click.option(
    "--top-p", type=click.FloatRange(0, 1, min_open=True), help="Sample from a nucleus. Default: 1, from all."
)
@click.option("--min-p", type=click.FloatRange(0, 1), help="Least share of the largest probability. Default: 0.")
@click.option(
    "--evaluation-problems",
    type=click.IntRange(0, MAX_EVALUATION_PROBLEMS),
    help="Held-out problems that validators solve for every version. Default: 256.",
)
@click.option(
    "--evaluation-samples",
    type=click.IntRange(0, MAX_EVALUATION_SAMPLES),
    help="Completions of each, for pass@k. Default: 0, the most likely one.",
)
@click.option("--pass-at", type=click.IntRange(1), help="k of pass@k. Default: 1.")
@click.option("--group-size", type=click.IntRange(2, MAX_GROUP_SIZE), help="Rollouts of a prompt. Default: 8.")
@click.option("--groups", type=click.IntRange(1, MAX_GROUPS), help="Most groups of a miner in a window. Default: 16.")
@click.option(
    "--deposit",
    type=click.FloatRange(0, 1e9),
    help="Groups that a key must have delivered before it earns and is trained on. Default: 32.",
)
@lora_options
@click.option(
    "--precision",
    type=click.Choice(["bf16", "fp8", "int8"]),
    help="What the layers' matrices of all versions consist of: docs/spec/quantized.md. Default: bf16.",
)
@click.option(
    "--numerics",
    type=click.Choice(["calibrated", "exact"]),
    default="calibrated",
    show_default=True,
    help="exact: all miners and validators compute the same bits, on CPUs, and nothing is tolerated.",
)
@click.option(
    "--miner-arithmetic",
    "miner_arithmetics",
    type=click.Choice(CALIBRATED),
    multiple=True,
    help="How miners may compute; repeat it for several. Default: as the recipe's engine does, or torch-float32.",
)
@click.option(
    "--validator-arithmetic",
    "validator_arithmetics",
    type=click.Choice(CALIBRATED),
    multiple=True,
    help="How validators may compute. Default: the same.",
)
@click.option(
    "--proof",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Thresholds that `grailnode calibrate` measured. Default: proof.json in the policy's directory.",
)
@click.option("--bucket", help="Keep the run in a bucket: NAME, s3://NAME/PREFIX or https://ENDPOINT/NAME/PREFIX.")
@click.option("--provider", type=click.Choice(["aws", "r2", "minio"]), default="aws", show_default=True)
@click.option("--region", default="", help="Of the bucket. Default: us-east-1; auto on R2.")
@click.option(
    "--url", default="", help="Where everybody reads the bucket. Default: the service's own URL; R2 has none."
)
@click.option("--reader", "readers", multiple=True, help="A principal that may read; without any, everybody may.")
@click.option(
    "--days",
    type=click.IntRange(1),
    default=7,
    show_default=True,
    help="Days for which objects of closed windows are kept.",
)
@click.option("--join", metavar="URL", help="Take part in the run whose manifest is there, instead of making one.")
@click.option("--meeting", help="With --join: the bucket in which participants announce themselves.")
@click.option("--name", default="miner-1", show_default=True, help="With --join: the node's name.")
@click.option("--roots", type=click.IntRange(1, 16), default=1, show_default=True, help="Root keys; 3 for a real run.")
@click.option("--threshold", type=click.IntRange(1, 16), help="Root keys that must sign. Default: 2, or 1 of 1.")
@click.option(
    "--trainers",
    type=click.IntRange(1, MAX_WORKERS),
    default=1,
    show_default=True,
    help="Sites that train together (docs/guide/many-trainers.md).",
)
@click.option(
    "--validators", type=click.IntRange(0, 16), default=1, show_default=True, help="Keys of validators to make."
)
@click.option(
    "--validator",
    "validator_keys",
    multiple=True,
    metavar="PUBLICKEY",
    help="A validator whose key somebody else holds.",
)
@click.option("--quorum", type=click.IntRange(1, 16), default=1, show_default=True, help="Validators that must accept.")
@click.option(
    "--spares",
    type=click.IntRange(0, MAX_KEYS),
    default=MAX_KEYS,
    help="Deal each group to the quorum and so many more validators. Default: every validator judges every group.",
)
@click.option(
    "--window",
    type=click.FloatRange(0.4, 3600),
    default=None,
    help="Seconds. Default: 2, for one machine; with a public beacon 60.",
)
@click.option(
    "--beacon",
    type=click.Choice(["own", "quicknet"]),
    default="own",
    show_default=True,
    help="Source of randomness: the run's own trainer, or drand, which nobody can predict.",
)
@click.option("--admission", type=click.Choice(["open", "allowlist", "invite"]), default="open", show_default=True)
@click.option(
    "--work",
    type=click.IntRange(0, 64),
    default=_WORK_BITS,
    show_default=True,
    help="Bits of proof of work that each key of an open run's miners does a day; 0 for none.",
)
def init(**parameters: Any) -> None:
    """Make a run in DIRECTORY: a commented run.toml, its keys, and the signed manifest.

    With --bucket the run lives in a bucket of S3, and what the bucket needs (policies, CORS, lifecycle) is written to
    DIRECTORY/bucket, with the commands that apply it. With --join as well, DIRECTORY is for a node of somebody else's
    run.
    """
    run_action("run_setup", "init", parameters)
