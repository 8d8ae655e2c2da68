"""The environment `reasoning-gym`: the tasks of reasoning-gym 0.1.25.

Its configuration is `{"task": NAME, ...}` with options of the task's dataset, or `{"tasks": {NAME: {...}, ...}}` for
several, one of which each seed draws. With `"levels": N` beside them, a task has up to N levels of its curriculum (at
most `MOST_LEVELS`, or what `LEVELS` says), which a run with `init --difficulty` draws by its tables. The answer is what
the last `<answer>` encloses, or else the whole completion.

Several tasks execute an answer to score it. Such an answer is scored only if it is made of the few signs that a right
one needs, so that it cannot become a program, and small numbers, so that it is soon computed. Work is bounded by
counting calls. An answer beyond a bound earns nothing, as one for which the task raises an exception.
"""

import hashlib
import importlib
import re
import sys
import types
from collections.abc import Callable
from typing import Any

MOST_CALLS = 5_000_000  # calls and returns of functions while an answer is scored
MOST_CHARACTERS = 50_000  # of an answer
DATASET_SIZE = 1000  # kinds of problems, where a dataset chooses them when it is opened
TRIES = 1000  # problems that are made until one is on the side that is asked for: of training, or held out
MOST_LEVELS = 4  # of a task, with `levels`
HELD_OUT = 128  # of 256 problems, by the first byte of the SHA-256 of their text

REFUSED = {
    "composite": 'name its tasks instead: {"tasks": {"countdown": {}, "gcd": {}}}',
    "codeio": "many of its programs read the clock or unseeded randomness",
    "game_of_life_halting": "it gives the full reward to any text",
    "sokoban": "it searches more than five seconds for some problems",
}

_FLOORS = {
    0.01: """color_cube_rotation emoji_mystery fraction_simplification graph_color group_anagrams gsm_symbolic jugs
        power_function prime_factorization puzzle24 rubiks_cube rush_hour tsumego""",
    0.05: "advanced_geometry arc_agi boxnet countdown knight_swap palindrome_generation rearc sentence_reordering",
    0.25: "propositional_logic",  # of a conclusion that is always true
}
FLOORS = {task: floor for floor, tasks in _FLOORS.items() for task in tasks.split()}
"""The most that a task gives to an answer without merit. A score up to this is no reward; of other tasks, up to 0."""

_LEVELS = {
    1: """acre coin_flip countdown gsm_symbolic jugs knight_swap list_functions modulo_grid n_queens
        polynomial_multiplication propositional_logic puzzle24 tower_of_hanoi""",
    2: "bf caesar_cipher circuit_logic letter_jumble needle_haystack polynomial_equations rush_hour",
    3: "futoshiki game_of_life kakurasu sudoku word_ladder",
}
LEVELS = {task: levels for levels, tasks in _LEVELS.items() for task in tasks.split()}
"""How many levels of a task's curriculum are used, where they are fewer than `MOST_LEVELS`: up to the first one that
does not exist or work, has few problems, makes one in over half a second or of over 25,000 characters, or whose own
answers are not scored. A task with one level has its default options.
"""

_number = r"\d{1,12}(?:\.\d{1,12})?(?![\d.])"
_power = r"\*\*\s*(?:-?\d{1,2}|\(\s*-?\d{1,2}(?:\s*/\s*\d{1,2})?\s*\))(?![\d.])(?!\s*\*\*)"
_few_powers = r"(?s:(?!.{301})(?!(?:.*\*\*){9})(?!(?:.*\)\s*\*\*){3}))"
_names = r"(?:sin|cos|tan|sec|csc|cot|asin|acos|atan|sinh|cosh|tanh|exp|log|ln|sqrt)(?=\s*\()|(?<!\w)[a-zA-Z](?!\w)"
_sum = re.compile(r"(?:[0-9+\-/() .]|\*(?!\*)){1,300}")
_formula = re.compile(rf"{_few_powers}(?:\s*(?:{_number}|{_power}|{_names}|\*(?!\*)|/(?!/)|[-+()]))+\s*")
_list = re.compile(r"[A-E0-9Q_'\", \n\[\]]*")
_EXECUTED = {
    **dict.fromkeys(("countdown", "puzzle24"), _sum),
    **dict.fromkeys(("intermediate_integration", "polynomial_multiplication", "simple_integration"), _formula),
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), _list),
}
_large_exponent = re.compile(r"[eE][+-]?\d{4}")  # of a decimal number, which becomes an integer of as many digits
_PLOTS = ("matplotlib", "matplotlib.animation", "matplotlib.collections", "matplotlib.pyplot", "mpl_toolkits.mplot3d")
_UNORDERED = {  # modules that draw from a list of a set, whose order is that of the process's hashes
    "algebra.polynomial_multiplication",
    "algorithmic.isomorphic_strings",
    "algorithmic.ransom_note",
}


class Placeholder(types.ModuleType):
    """Takes the place of a module that a dependency imports and no task uses. Each of its names is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class TooManyCallsError(Exception):
    """Scoring an answer took more calls than are allowed."""


class ReasoningGym:
    """Tasks of reasoning-gym. A problem's reference is its task and the seed from which it is made again."""

    exact = True
    held_out_size = None

    def __init__(self, config: dict[str, Any]) -> None:
        if not config.keys() & {"task", "tasks"}:
            raise ValueError('the configuration names no task, as in {"task": "countdown"}')
        options = dict(config)
        most = options.pop("levels", 1)
        tasks = options.pop("tasks") if "tasks" in options else {options.pop("task"): options}
        if "tasks" in config and options:
            raise ValueError(f"beside `tasks` there may be `levels` alone, and not {', '.join(options)}")
        for task in tasks.keys() & REFUSED.keys():
            raise ValueError(f"task {task!r} is refused: {REFUSED[task]}")
        sys.modules |= {name: Placeholder(name) for name in _PLOTS}
        create = importlib.import_module("reasoning_gym").create_dataset
        for name in _UNORDERED:
            vars(importlib.import_module(f"reasoning_gym.{name}"))["list"] = lambda values: sorted(values, key=str)
        _bound_number_sequences()
        self._datasets = {}  # by kind: a task, or a task, '-' and a level
        for task in sorted(tasks):
            fixed = {**tasks[task], "seed": 0, "size": DATASET_SIZE}
            levels = range(min(most, LEVELS.get(task, MOST_LEVELS)))
            if len(levels) < 2:
                self._datasets[task] = create(task, **fixed)
            else:
                self._datasets |= {f"{task}-{level}": create(task, **_options(task, level, fixed)) for level in levels}
        self.levels = dict.fromkeys(self._datasets, 1) if most > 1 else {}

        for kind in self._datasets:  # what is imported and cached at the first score stays shared with all forks
            self.reward({"reference": [kind, 0]}, str(self._entry(kind, 0)["answer"]))

    def problem(self, seed: bytes) -> dict[str, Any]:
        return self._draw(b"training" + seed, False, list(self._datasets))

    def problem_of_level(self, level: str, seed: bytes) -> dict[str, Any]:
        return self._draw(b"training" + seed, False, [level])

    def held_out_problem(self, index: int) -> dict[str, Any]:
        return self._draw(b"held-out %d" % index, True, list(self._datasets))

    def _draw(self, seed: bytes, held_out: bool, kinds: list[str]) -> dict[str, Any]:
        for attempt in range(TRIES):
            digest = hashlib.sha256(seed + b" %d" % attempt).digest()
            kind = kinds[int.from_bytes(digest[4:12], "big") % len(kinds)]
            number = int.from_bytes(digest[:4], "big") >> 1
            question = self._entry(kind, number)["question"]
            if (hashlib.sha256(question.encode()).digest()[0] < HELD_OUT) == held_out:
                return {"prompt": question, "reference": [kind, number], "stratum": kind}
        raise ValueError("a task with too few problems")

    def _entry(self, kind: str, seed: int) -> Any:
        """Return a problem in the form of reasoning-gym. Some of its datasets take long to open, so each is opened once
        and has its seed changed.
        """
        dataset = self._datasets[kind]
        dataset.seed = dataset.config.seed = seed
        return dataset[seed % DATASET_SIZE]

    def reward(self, problem: dict[str, Any], completion: str) -> float:
        kind, seed = problem["reference"]
        task = kind.partition("-")[0]
        answer = answer_of(completion)
        if not is_scored(task, answer):
            return 0.0
        entry = self._entry(kind, seed)
        sys.setprofile(_counter())
        try:
            score = float(self._datasets[kind].score_answer(answer, entry))
        except Exception:  # noqa: BLE001, whatever a task raises, the answer is at fault
            return 0.0
        finally:
            sys.setprofile(None)
        return score if FLOORS.get(task, 0.0) < score <= 1.0 else 0.0


def _options(task: str, level: int, fixed: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a task at a level of its curriculum, without the problems of easier levels."""
    module = importlib.import_module("reasoning_gym.coaching.base_curriculum")
    curriculum = importlib.import_module("reasoning_gym.factory").create_curriculum(task)
    curriculum.set_global_level(level)
    hardest = module.DefaultCurriculumContext(module.RangeAttributeMode.UPPER_BOUND)
    return dict(vars(curriculum.generate_configuration(fixed, hardest)))


def _bound_number_sequences() -> None:
    """Let number_sequence discard a sequence at its first number above 1,000, and not only when all are computed: some
    have numbers of millions of digits.
    """
    rule = importlib.import_module("reasoning_gym.cognition.number_sequences").PatternRule
    apply = rule.apply

    def bounded_apply(self: Any, sequence: list[int], position: int) -> int:
        if abs(sequence[position]) > 1000:
            raise OverflowError
        number: int = apply(self, sequence, position)
        return number

    rule.apply = bounded_apply


def answer_of(completion: str) -> str:
    """Return the answer in a completion."""
    return completion.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def is_scored(task: str, answer: str) -> bool:
    """Return whether a task may score an answer: whether it is bounded, and no program where it is executed."""
    if len(answer) > MOST_CHARACTERS or _large_exponent.search(answer):
        return False
    form = _EXECUTED.get(task)
    return form is None or form.fullmatch(answer) is not None


def _counter() -> Callable[[object, str, object], None]:
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += 1
        if calls > MOST_CALLS:
            raise TooManyCallsError

    return count
