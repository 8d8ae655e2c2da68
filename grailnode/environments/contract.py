"""The contract of an environment: what `grailnode environments check` looks at, in two processes whose hashes differ.

`python -m grailnode.environments.contract NAME [DATA]` prints the observations of a built-in environment as JSON.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import grailnode
from grailnode.environments import registry
from grailnode.environments.plugin_environment import PluginEnvironment
from grailnode.environments.wheels import PluginError
from grailnode.sandbox import BubblewrapSandbox
from protocol import environments
from protocol.environments import Environment, Problem
from protocol.environments.base import SandboxError

PROBLEMS: Final = 200
"""Seeds, and held-out problems at most, that a check draws."""
_JUDGED: Final = 4  # problems for which all these answers are judged
_SLOW_SECONDS: Final = 5.0  # of one reward: a sixth of the time that stops a node
_DATA: Final = Path(grailnode.__file__).parent / "data" / "environments"

ANSWERS: Final = {
    "an empty answer": "",
    "junk": "zzz",
    "a number": "42",
    "a control character": "\0\x1b[2J\ud800",
    "a huge answer": "1+" * (1 << 18),
    "many brackets": "(" * 100_000,
    "a huge power": "9**9**9**9",
    "many signs": "-" * 10_000 + "1",
    "a program": "__import__('os').system('touch /tmp/x')",
    "an exit": "<solution>__import__('os')._exit(0)</solution>",
    "a number that is none": "<answer>nan</answer> \\boxed{1e999}",
}
"""Answers that a policy may write, by what they are."""


@dataclass(frozen=True)
class Observations:
    """What one process saw: the texts of problems, the pairs of an answer and its reward (or error), and the seconds of
    the slowest reward.
    """

    training: list[str]
    held_out: list[str]
    rewards: list[list[float | str]]
    slowest: float


def observe(environment: Environment, count: int = PROBLEMS) -> Observations:
    """Draw problems of an environment, and judge hostile answers."""
    training = [environment.problem(_seed(number)) for number in range(count)]
    count = min(count, environment.held_out_size or count)
    held_out = [environment.held_out_problem(index) for index in range(count)]
    rewards: list[list[float | str]] = []
    slowest = 0.0
    for problem in (*training[:_JUDGED], *held_out[:1]):
        for answer in (*ANSWERS, "the prompt"):
            start = time.monotonic()
            rewards.append([answer, _reward(environment, problem, ANSWERS.get(answer, problem.prompt))])
            slowest = max(slowest, time.monotonic() - start)
    return Observations(list(map(_text, training)), list(map(_text, held_out)), rewards, slowest)


def _seed(number: int) -> bytes:
    return hashlib.sha256(f"environments check {number}".encode()).digest()


def _text(problem: Problem) -> str:
    return json.dumps([problem.prompt, problem.reference, problem.stratum])


def _reward(environment: Environment, problem: Problem, answer: str) -> float | str:
    try:
        if isinstance(environment, PluginEnvironment):
            return environment.judge(problem, answer)
        return environment.reward(problem, answer)
    except Exception as error:  # noqa: BLE001, this is what is looked for
        return f"{type(error).__name__}: {error}"


def observe_by_hash_seed(name: str, config: str, data: Path | None, hash_seed: int) -> Observations:
    """Return the observations of a new process.

    Raises:
        PluginError, SandboxError: the environment cannot be opened here, or does not make its problems.
    """
    if not registry.is_built_in(name):
        environment = registry.open_plugin(name, config, hash_seed=hash_seed).environment
        try:
            return observe(environment)
        finally:
            environment.close()
    command = (sys.executable, "-m", __name__, name, *([] if data is None else [str(data)]))
    result = subprocess.run(
        command, env=os.environ | {"PYTHONHASHSEED": str(hash_seed)}, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise PluginError(f"environment {name!r}: {result.stderr.strip().rpartition(chr(10))[2]}")
    return Observations(**json.loads(result.stdout))


def example_data(needs: environments.Requirements) -> Path:
    """Return the packaged file of problems for environments with these requirements."""
    return _DATA / ("code.jsonl" if needs.python else "math.jsonl")


def open_built_in(name: str, data: Path | None) -> Environment:
    """Return a built-in environment; one that reads a data file gets the example of this program without one."""
    needs = environments.requirements(name)
    if not needs.data:
        return environments.get(name)
    file = data or example_data(needs)
    return environments.get(name, file.read_bytes(), BubblewrapSandbox.open(needs.python) if needs.python else None)


def failures(first: Observations, second: Observations) -> Iterator[tuple[str, str]]:
    """Return each part of the contract, with what is wrong; empty if nothing is."""
    count = len(first.held_out)
    yield (
        f"problems of {len(first.training)} seeds are equal in two processes",
        _difference(first.training, second.training),
    )
    yield f"{count} held-out problems are equal in two processes", _difference(first.held_out, second.held_out)
    prompts = [{json.loads(text)[0] for text in texts} for texts in (first.training, first.held_out)]
    common = sorted(prompts[0] & prompts[1])
    yield "held-out problems are apart from training", f"in both: {common[0][:60]!r}" if common else ""
    yield "problems differ", "" if min(map(len, prompts)) > 1 or count == 1 else "all of them are equal"
    wrong = [f"{answer} gave {reward}" for answer, reward in first.rewards if not _is_reward(reward)]
    yield "every answer has a reward in [0, 1], without an exception", "; ".join(dict.fromkeys(wrong))[:300]
    pairs = zip(first.rewards, second.rewards, strict=True)
    unequal = [one[0] for one, other in pairs if one != other]
    yield "rewards are equal in two processes", f"of {unequal[0]}" if unequal else ""
    junk = [reward for answer, reward in first.rewards if answer == "junk"]
    yield "junk earns nothing", f"{junk[0]} for 'zzz'" if all(_is_reward(reward) and reward for reward in junk) else ""
    slowest = max(first.slowest, second.slowest)
    yield "every reward is fast", f"one took {slowest:.1f} s" if slowest > _SLOW_SECONDS else ""


def _difference(first: list[str], second: list[str]) -> str:
    places = [place for place, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]]
    return f"number {places[0]} differs, and {len(places) - 1} more" if places else ""


def _is_reward(value: float | str) -> bool:
    return not isinstance(value, str) and 0.0 <= value <= 1.0


def main() -> None:
    """Print the observations of a built-in environment."""
    name, *data = sys.argv[1:]
    print(json.dumps(asdict(observe(open_built_in(name, Path(data[0]) if data else None)))))


if __name__ == "__main__":
    try:
        main()
    except (SandboxError, OSError, ValueError) as error_:
        sys.exit(str(error_))
