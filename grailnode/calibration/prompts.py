"""Where the prompts of a calibration come from: an environment, or a file of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from grailnode.calibration.measure import CalibrationError
from grailnode.engine.policy import Tokenizer
from protocol import bounded_json, environments
from protocol.environments.dataset import Dataset
from protocol.errors import MalformedError

Prompts = Callable[[bytes], str]
"""The prompt of a group's 32-byte seed."""

_MAX_BYTES: Final = 1 << 30


def of_environment(name: str, problems: Dataset | None) -> Prompts:
    """An environment's training problems.

    Args:
        problems: of its data file, where it reads one; as `provisions.check` gives them.
    """
    drawn = environments.get(name) if problems is None else problems
    return lambda seed: drawn.problem(seed).prompt


def of_file(path: Path, tokenizer: Tokenizer) -> Prompts:
    """The prompts of a file of JSON Lines, each {"prompt": "..."}.

    Raises:
        CalibrationError: it is no such file; says which line.
    """
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise CalibrationError(f"{path}: larger than {_MAX_BYTES} bytes")
    prompts: list[str] = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = bounded_json.parse(line)
        except MalformedError as error:
            raise CalibrationError(f"{path}: line {number}: {error}") from error
        prompt = value.get("prompt") if isinstance(value, dict) else None
        if not isinstance(prompt, str) or not tokenizer.encode(prompt):
            raise CalibrationError(f'{path}: line {number}: not {{"prompt": "..."}} with at least one token')
        prompts.append(prompt)
    if not prompts:
        raise CalibrationError(f"{path}: no prompt in it")
    return lambda seed: prompts[int.from_bytes(seed[:8], "little") % len(prompts)]
