"""`grailnode evaluate` and `grailnode chat`: what a checkpoint, or the newest version of a run, can do."""

from typing import Any, Final

import click

from grailnode.cli.from_model import options
from grailnode.cli.options import policy_options, run_action, shown_option
from grailnode.run.rules import Rules
from protocol import limits

_RULES: Final = (
    *("environment", "environment_config", "data", "chat", "system_prompt"),
    *("max_tokens", "turns", "turn_tokens", "reply_tokens", "episode_tokens", "temperature"),
)


def _numbers(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    """Return the values of --k, ascending."""
    words = text.split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= limits.MAX_EVALUATION_SAMPLES for word in words):
        raise click.BadParameter(f"{text}: write numbers from 1 to {limits.MAX_EVALUATION_SAMPLES}, such as 1,8")
    return tuple(sorted({int(word) for word in words}))


@click.command()
@policy_options
@options(Rules, _RULES)
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
def evaluate(**parameters: Any) -> None:
    """Measure pass@k on held-out problems, of the checkpoint in DIRECTORY or of a run's newest version (--run).

    Every number has its 95% interval. A run's version is verified, and asked as in the run: its task, chat template and
    sampling, with the noise that its validators use. --environment asks the problems of another task.
    """
    run_action("policy_evaluation", "evaluate", parameters)


@click.command()
@policy_options
@click.option("--message", help="Print the answer to this, and end.")
@click.option("--max-tokens", type=click.IntRange(1, limits.MAX_COMPLETION_TOKENS), help="Of an answer.")
@click.option("--greedy", is_flag=True, help="Take the most likely tokens. Default: sample.")
def chat(**parameters: Any) -> None:
    """Answer each line with the checkpoint in DIRECTORY, or with a run's newest version (--run), until Ctrl-D.

    A line is a conversation of its own, in the chat template of the run or of the checkpoint, if it has one. Newer
    versions of a run are fetched between two lines, and verified.
    """
    run_action("conversation", "chat", parameters)
