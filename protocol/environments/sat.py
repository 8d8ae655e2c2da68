"""The 3-SAT environment: find values of variables that make every clause true (docs/spec/environments.md).

The prompt '(+1-2+4)(-1+3+4)=' represents (x1 or not x2 or x4) and (not x1 or x3 or x4). It may be continued by '1011',
the values of x1, x2, x3 and x4. Every formula is satisfiable: a hidden assignment is drawn first, and only clauses that
it makes true are used.
"""

import re
from typing import Final

from protocol.environments.base import Problem
from protocol.environments.seeded_rng import DrawnProblems, LeveledProblems, SeededRng

_MIN_VARIABLES: Final = 4
_MAX_VARIABLES: Final = 8
_LITERALS: Final = 3
_CLAUSES_PER_VARIABLE: Final = 3
_WELL_FORMED_REWARD: Final = 0.1
_LITERAL: Final = re.compile(r"[+-][0-9]+")

Clause = tuple[int, ...]
"""Three literals, v for variable v (1, 2, ...) and -v for its negation, in the order of the variables."""


def _clause(rng: SeededRng, variables: int) -> Clause:
    clause_variables: list[int] = []
    while len(clause_variables) < _LITERALS:
        variable = rng.between(1, variables)
        if variable not in clause_variables:
            clause_variables.append(variable)
    return tuple(variable if rng.below(2) else -variable for variable in sorted(clause_variables))


def _is_true(clause: Clause, values: str) -> bool:
    """Return whether an assignment ('0' or '1' for each variable in order) makes a clause true."""
    return any((values[abs(literal) - 1] == "1") == (literal > 0) for literal in clause)


def _draw(rng: SeededRng) -> list[Clause]:
    variables = rng.between(_MIN_VARIABLES, _MAX_VARIABLES)
    assignment = "".join(str(rng.below(2)) for _ in range(variables))
    count = _CLAUSES_PER_VARIABLE * variables + rng.below(variables + 1)
    clauses: list[Clause] = []
    # Until there are enough, and every variable occurs.
    while len(clauses) < count or len({abs(literal) for clause in clauses for literal in clause}) < variables:
        clause = _clause(rng, variables)
        if clause not in clauses and _is_true(clause, assignment):
            clauses.append(clause)
    return sorted(clauses)


def _parse(formula: str) -> list[Clause]:
    return [tuple(map(int, _LITERAL.findall(clause))) for clause in formula.strip("()").split(")(")]


def _variables(clauses: list[Clause]) -> int:
    return max(abs(literal) for clause in clauses for literal in clause)


class Sat(DrawnProblems, LeveledProblems):
    """3-SAT. The reward is 1.0 for values that satisfy the formula, 0.1 for as many other values, and 0.0 for any other
    text.
    """

    name = "sat"

    def draw(self, rng: SeededRng) -> Problem:
        formula = "".join("(" + "".join(f"{literal:+d}" for literal in clause) + ")" for clause in _draw(rng))
        return Problem(prompt=f"{formula}=", reference=formula)

    @property
    def levels(self) -> dict[str, int]:
        return {str(variables): 1 for variables in range(_MIN_VARIABLES, _MAX_VARIABLES + 1)}

    def level_of(self, problem: Problem) -> str:
        return str(_variables(_parse(problem.reference)))

    def reward(self, problem: Problem, completion: str) -> float:
        clauses = _parse(problem.reference)
        variables = _variables(clauses)
        if len(completion) != variables or not set(completion) <= {"0", "1"}:
            return 0.0
        return 1.0 if all(_is_true(clause, completion) for clause in clauses) else _WELL_FORMED_REWARD
