"""3-SAT: values for variables that make every clause true (docs/spec/environments.md).

A formula is satisfiable by construction: a hidden assignment is drawn first, and only clauses that it makes true are kept.
"""

from typing import Final

from protocol.environments.base import Problem
from protocol.environments.draws import Draws, is_held_out

_LEAST_VARIABLES: Final = 4
_MOST_VARIABLES: Final = 8
_LITERALS: Final = 3
_CLAUSES_PER_VARIABLE: Final = 3
_WELL_FORMED_REWARD: Final = 0.1

Clause = tuple[int, ...]
"""Three literals: v for variable v (1, 2, ...), -v for its negation; by variable."""


def _clause(draws: Draws, variables: int) -> Clause:
    chosen: list[int] = []
    while len(chosen) < _LITERALS:
        variable = draws.between(1, variables)
        if variable not in chosen:
            chosen.append(variable)
    return tuple(variable if draws.below(2) else -variable for variable in sorted(chosen))


def _holds(clause: Clause, values: str) -> bool:
    """Whether an assignment ('0' or '1' for each variable, the first one first) makes a clause true."""
    return any((values[abs(literal) - 1] == "1") == (literal > 0) for literal in clause)


def _draw(draws: Draws) -> tuple[int, list[Clause]]:
    variables = draws.between(_LEAST_VARIABLES, _MOST_VARIABLES)
    hidden = "".join(str(draws.below(2)) for _ in range(variables))
    count = _CLAUSES_PER_VARIABLE * variables + draws.below(variables + 1)
    clauses: list[Clause] = []
    while len(clauses) < count:
        clause = _clause(draws, variables)
        if clause not in clauses and _holds(clause, hidden):
            clauses.append(clause)
    return variables, sorted(clauses)


def _reference(variables: int, clauses: list[Clause]) -> str:
    return f"{variables}:" + ",".join(" ".join(map(str, clause)) for clause in clauses)


def _parse(reference: str) -> tuple[int, list[Clause]]:
    variables, _, clauses = reference.partition(":")
    return int(variables), [tuple(map(int, clause.split(" "))) for clause in clauses.split(",")]


def _problem(variables: int, clauses: list[Clause]) -> Problem:
    lines = (" or ".join(f"x{v}" if v > 0 else f"not x{-v}" for v in clause) for clause in clauses)
    prompt = (
        f"Give x1 to x{variables} values that make every line true.\n"
        + "\n".join(lines)
        + f"\nAnswer with {variables} digits, 1 for true and 0 for false, x1 first.\nAnswer:"
    )
    return Problem(prompt, _reference(variables, clauses))


class Sat:
    """Satisfy the formula: 1.0 for values that do, 0.1 for other values of the right number, 0.0 for any other text."""

    name = "sat"

    def problem(self, seed: bytes) -> Problem:
        """The training problem of a seed; a solution exists."""
        return self._first(Draws("sat", seed), held_out=False)

    def held_out(self, index: int) -> Problem:
        """The held-out problem of an index; a solution exists."""
        return self._first(Draws("sat held-out", str(index).encode()), held_out=True)

    def _first(self, draws: Draws, *, held_out: bool) -> Problem:
        while True:
            problem = _problem(*_draw(draws))
            if is_held_out(f"sat {problem.reference}") == held_out:
                return problem

    def reward(self, problem: Problem, completion: str) -> float:
        """Judges any text: digits, with spaces or line ends around them."""
        variables, clauses = _parse(problem.reference)
        values = completion[: 4 * variables].strip(" \n")
        if len(completion) > 4 * variables or len(values) != variables or not set(values) <= {"0", "1"}:
            return 0.0
        return 1.0 if all(_holds(clause, values) for clause in clauses) else _WELL_FORMED_REWARD
