"""What judges decide, sign and pay is computed from whole numbers, so that it is the same on every machine."""

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType

import pytest

from protocol.judging import accounts, evidence, ledger, report, roster, verdict
from roles.trainer.collect import logprob_bias, quorum

MODULES = [accounts, evidence, ledger, report, roster, verdict, logprob_bias, quorum]
BORDER = {"whole_margins", "pass_at_k", "pass_at"}  # from what an engine measures, and to what people see
FLOAT_NAMES = {"math", "log", "log2", "log10", "log1p", "exp", "sqrt", "mean", "std", "var", "median", "average"}


def float_expressions(node: ast.AST) -> Iterator[str]:
    """Yield the expressions that may compute with floats."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and child.name in BORDER:
            continue
        name = getattr(child, "id", getattr(child, "attr", ""))
        is_division = isinstance(child, ast.BinOp | ast.AugAssign) and isinstance(child.op, ast.Div)
        is_constant = isinstance(child, ast.Constant) and isinstance(child.value, float)
        if is_division or is_constant or name in FLOAT_NAMES or name.startswith("float"):
            yield ast.unparse(child)
        yield from float_expressions(child)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_evidence_decisions_and_scores_use_no_float(module: ModuleType) -> None:
    assert list(float_expressions(ast.parse(inspect.getsource(module)))) == []
