"""The contract of an environment: what `grailnode environments check` looks at, in two processes whose hashes differ.

`python -m grailnode.environments.contract NAME [DATA]` prints the observations of a built-in environment as JSON.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import grailnode
from grailnode.environments import registry
from grailnode.environments.wheels import PluginError
from grailnode.sandbox import BubblewrapSandbox
from grailnode.sandbox.plugin_sandbox import CallError
from protocol import environments, limits
from protocol.environments import Environment, Problem
from protocol.environments.base import Episode, EpisodeEnvironment, SandboxError
from protocol.environments.mixture import Strata
from protocol.errors import ProtocolError

PROBLEMS: Final = 200
"""Seeds, and held-out problems at most, that a check draws."""
_JUDGED: Final = 4  # problems for which all these answers are judged
_SLOW_SECONDS: Final = 5.0  # of processor time of one answer, as the sandbox allows a plug-in that is checked
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


_WORDS: Final = "words of the prompt and the last reply"


@dataclass(frozen=True)
class Observations:
    """What one process saw: the texts of problems, and what became of answers, each of which was every turn of an
    episode: what it is, the replies, and the reward or error; and the most seconds of its processor time for one.
    """

    training: list[str]
    held_out: list[str]
    plays: list[tuple[str, list[str], float | str]]
    slowest: float


def turns(environment: Environment) -> int:
    """Return the most turns of an environment; 1 for one without episodes."""
    return environment.turns if isinstance(environment, EpisodeEnvironment) else 1


class _Completion:
    """A completion as an episode of one turn."""

    def __init__(self, environment: Environment, problem: Problem) -> None:
        self._environment, self._problem, self._text = environment, problem, ""

    def step(self, text: str) -> None:
        self._text = text

    def reward(self) -> float:
        return self._environment.reward(self._problem, self._text)


def begin(environment: Environment, problem: Problem, seed: bytes) -> Episode:
    """Return a new episode of a problem; of one turn where the environment has no episodes."""
    if isinstance(environment, EpisodeEnvironment) and environment.turns > 1:
        return environment.begin(problem, seed)
    return _Completion(environment, problem)


def observe(environment: Environment, count: int = PROBLEMS) -> Observations:
    """Draw problems of an environment, and judge hostile answers."""
    training = [environment.problem(_seed(number)) for number in range(count)]
    strata = Strata(environment)
    names = list(strata.weights)
    training += [strata.problem(names[number % len(names)], _seed(number)) for number in range(count) if names]
    count = min(count, environment.held_out_size or count)
    held_out = [environment.held_out_problem(index) for index in range(count)]
    plays = []
    slowest = 0.0
    for problem in (*training[:_JUDGED], *held_out[:1]):
        for answer in (*ANSWERS, "the prompt", _WORDS):
            start = time.process_time()
            plays.append((answer, *_play(environment, problem, answer)))
            slowest = max(slowest, time.process_time() - start)
    return Observations(list(map(_text, training)), list(map(_text, held_out)), plays, slowest)


def _seed(number: int) -> bytes:
    return hashlib.sha256(f"environments check {number}".encode()).digest()


def _text(problem: Problem) -> str:
    return json.dumps([problem.prompt, problem.reference, problem.stratum])


def _play(environment: Environment, problem: Problem, answer: str) -> tuple[list[str], float | str]:
    """Return the replies to an answer that is given again and again, and the reward or an error."""
    replies: list[str] = []
    try:
        episode = begin(environment, problem, _seed(0))
        for turn in range(turns(environment)):
            words = " ".join((problem.prompt, *replies[-1:])).split() or [""]
            word = words[_seed(turn)[0] % len(words)].strip(".,:;") if answer == _WORDS else problem.prompt
            reply = episode.step(ANSWERS.get(answer, word))
            if reply is None:
                break
            replies.append(reply)
        return replies, episode.reward()
    except CallError as error:
        return replies, str(error)
    except Exception as error:  # noqa: BLE001, this is what is looked for
        return replies, f"{type(error).__name__}: {error}"


def observe_by_hash_seed(name: str, config: str, data: Path | None, hash_seed: int) -> Observations:
    """Return the observations of a new process; PluginError or SandboxError if the environment does not work here."""
    if not registry.is_built_in(name):
        environment = registry.open_plugin(name, config, hash_seed=hash_seed, strict=True).environment
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
    has_turns = any(replies for _, replies, _ in first.plays)  # and may hide in the reference what is to be found out
    parts = 2 if has_turns else 1
    problems = [{str(json.loads(text)[:parts]) for text in texts} for texts in (first.training, first.held_out)]
    common = sorted(problems[0] & problems[1])
    yield "held-out problems are apart from training", f"in both: {common[0][:60]}" if common else ""
    yield "problems differ", "" if min(map(len, problems)) > 1 or count == 1 else "all of them are equal"
    wrong = defaultdict[float | str, dict[str, None]](dict)  # answers by what each of them gave
    for answer, _, reward in first.plays:
        if not _is_reward(reward):
            wrong[reward][answer] = None
    texts = [f"{', '.join(answers)}: {given}" for given, answers in wrong.items()]
    yield "every answer has a reward in [0, 1], without an exception", "; ".join(texts)[:300]
    pairs = zip(first.plays, second.plays, strict=True)
    unequal = [one[0] for one, other in pairs if tuple(one) != tuple(other)]
    yield "replies and rewards are equal in two processes", f"of {unequal[0]}" if unequal else ""
    sizes = [len(reply.encode(errors="replace")) for _, replies, _ in first.plays for reply in replies]
    longest = max(sizes, default=0)
    yield "no reply is cut", f"one has {longest} bytes" if longest > limits.MAX_REPLY_BYTES else ""
    junk = [reward for answer, _, reward in first.plays if answer == "junk"]
    yield "junk earns nothing", f"{junk[0]} for 'zzz'" if all(_is_reward(reward) and reward for reward in junk) else ""
    slowest = max(first.slowest, second.slowest)
    yield "every answer is judged fast", f"one took {slowest:.1f} s" if slowest > _SLOW_SECONDS else ""


def _difference(first: list[str], second: list[str]) -> str:
    places = [place for place, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]]
    return f"number {places[0]} differs, and {len(places) - 1} more" if places else ""


def _is_reward(value: float | str) -> bool:
    return not isinstance(value, str) and 0.0 <= value <= 1.0


def main() -> None:
    name, *data = sys.argv[1:]
    print(json.dumps(asdict(observe(open_built_in(name, Path(data[0]) if data else None)))))


if __name__ == "__main__":
    try:
        main()
    except (SandboxError, ProtocolError, OSError, ValueError) as error_:
        sys.exit(str(error_))
