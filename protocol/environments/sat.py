"""3-SAT: values for variables that make every clause true (docs/spec/environments.md).

'(+1-2+4)(-1+3+4)=' stands for (x1 or not x2 or x4) and (not x1 or x3 or x4); it is continued by '1011', the value of x1
first.
A formula is satisfiable by construction: a hidden assignment is drawn first, and only clauses that it makes true are
kept.
"""

import re
from typing import Final

from protocol.environments.base import Problem
from protocol.environments.seeded_rng import SeededRng, is_held_out

_LEAST_VARIABLES: Final = 4
_MOST_VARIABLES: Final = 8
_LITERALS: Final = 3
_CLAUSES_PER_VARIABLE: Final = 3
_WELL_FORMED_REWARD: Final = 0.1
_LITERAL: Final = re.compile(r"[+-][0-9]+")

Clause = tuple[int, ...]
"""Three literals: v for variable v (1, 2, ...), -v for its negation; by variable."""


def _clause(draws: SeededRng, variables: int) -> Clause:
    chosen: list[int] = []
    while len(chosen) < _LITERALS:
        variable = draws.between(1, variables)
        if variable not in chosen:
            chosen.append(variable)
    return tuple(variable if draws.below(2) else -variable for variable in sorted(chosen))


def _holds(clause: Clause, values: str) -> bool:
    """Whether an assignment ('0' or '1' for each variable, the first one first) makes a clause true."""
    return any((values[abs(literal) - 1] == "1") == (literal > 0) for literal in clause)


def _complete(clauses: list[Clause], variables: int) -> bool:
    """Whether every variable occurs."""
    return {abs(literal) for clause in clauses for literal in clause} == set(range(1, variables + 1))


def _draw(draws: SeededRng) -> list[Clause]:
    variables = draws.between(_LEAST_VARIABLES, _MOST_VARIABLES)
    hidden = "".join(str(draws.below(2)) for _ in range(variables))
    count = _CLAUSES_PER_VARIABLE * variables + draws.below(variables + 1)
    clauses: list[Clause] = []
    while len(clauses) < count or not _complete(clauses, variables):
        clause = _clause(draws, variables)
        if clause not in clauses and _holds(clause, hidden):
            clauses.append(clause)
    return sorted(clauses)


def _problem(clauses: list[Clause]) -> Problem:
    formula = "".join("(" + "".join(f"{literal:+d}" for literal in clause) + ")" for clause in clauses)
    return Problem(prompt=f"{formula}=", reference=formula)


def _parse(formula: str) -> list[Clause]:
    return [tuple(map(int, _LITERAL.findall(clause))) for clause in formula.strip("()").split(")(")]


class Sat:
    """Satisfy the formula: 1.0 for values that do, 0.1 for other values of the right number, 0.0 for any other text."""

    name = "sat"
    exact = True
    held_out_size = None

    def problem(self, seed: bytes) -> Problem:
        """The training problem of a seed; a solution exists."""
        return self._first(SeededRng("sat", seed), held_out=False)

    def held_out(self, index: int) -> Problem:
        """The held-out problem of an index; a solution exists."""
        return self._first(SeededRng("sat held-out", str(index).encode()), held_out=True)

    def _first(self, draws: SeededRng, *, held_out: bool) -> Problem:
        while True:
            problem = _problem(_draw(draws))
            if is_held_out(f"sat {problem.reference}") == held_out:
                return problem

    def reward(self, problem: Problem, completion: str) -> float:
        """Judges any text."""
        clauses = _parse(problem.reference)
        variables = max(abs(literal) for clause in clauses for literal in clause)
        if len(completion) != variables or not set(completion) <= {"0", "1"}:
            return 0.0
        return 1.0 if all(_holds(clause, completion) for clause in clauses) else _WELL_FORMED_REWARD
