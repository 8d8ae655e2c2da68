"""The source of the prompts of a calibration: an environment or a file."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from grailnode import UserError
from grailnode.engine.policy import Tokenizer
from protocol import bounded_json
from protocol.errors import MalformedError

Prompts = Callable[[bytes], str]
"""Returns the prompt for a group's 32-byte seed."""

_MAX_BYTES: Final = 1 << 30


def drawn_from(prompts: Sequence[str]) -> Prompts:
    """Return prompts of which each is as likely as the others."""
    return lambda seed: prompts[int.from_bytes(seed[:8], "little") % len(prompts)]


def read_file(path: Path, tokenizer: Tokenizer) -> list[str]:
    """Return the prompts of a file of JSON Lines, each {"prompt": "..."}; a UserError names the wrong line."""
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise UserError(f"{path}: larger than {_MAX_BYTES} bytes")
    prompts: list[str] = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = bounded_json.parse(line)
        except MalformedError as error:
            raise UserError(f"{path}: line {number}: {error}") from error
        prompt = value.get("prompt") if isinstance(value, dict) else None
        if not isinstance(prompt, str) or not tokenizer.encode(prompt):
            raise UserError(f'{path}: line {number}: not {{"prompt": "..."}} with at least one token')
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"{path}: contains no prompt")
    return prompts
