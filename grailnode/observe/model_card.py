"""The README of an exported policy: where the weights come from, and how training went."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from jinja2 import Environment, StrictUndefined

from grailnode.observe.state import WindowRow
from protocol.run import RunManifest

_TEMPLATE: Final = Path(__file__).with_suffix(".md")
_MARKUP: Final = "\\`*_{}[]<>|#!\r\n"


def model_card(
    run_id: bytes, run: RunManifest, version: int, digest: bytes, windows: Sequence[WindowRow], *, merged: bool = False
) -> str:
    """Return the text of the card in Markdown, with what validators measured, oldest first."""
    environment = Environment(  # noqa: S701 - the text is no HTML; names go through `plain`
        trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.filters["plain"] = _plain
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        run_id=run_id, run=run, sampling=run.sampling, version=version, digest=digest, windows=windows, merged=merged
    )


def _plain(text: str) -> str:
    """Return a text without characters that Markdown gives a meaning."""
    return "".join(char if char.isprintable() and char not in _MARKUP else " " for char in text).strip()
