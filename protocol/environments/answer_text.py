"""The text of an answer without its typesetting: wrappers, sizes of brackets, spacing (docs/spec/environments.md).

Spaces stay, because they tell a unit or a word from a product of symbols.
"""

import re
from typing import Final

SET_OPENING: Final = "\x01"
SET_CLOSING: Final = "\x02"
ROW_END: Final = "\x03"

_WRAPPERS: Final = (
    "boxed",
    "fbox",
    "text",
    "textbf",
    "textit",
    "textrm",
    "mathrm",
    "mathbf",
    "mathit",
    "mbox",
    "operatorname",
)
_DELIMITERS: Final = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_REPLACEMENTS: Final = (
    (r"\\", ROW_END),  # the end of a matrix row; it comes first, because its second backslash could begin a command
    (r"\dfrac", r"\frac"),
    (r"\tfrac", r"\frac"),
    (r"\cfrac", r"\frac"),
    (r"\leftarrow", "\x06"),
    (r"\left", ""),
    (r"\right", ""),
    (r"\displaystyle", ""),
    (r"\qquad", " "),
    (r"\quad", " "),
    (r"\%", "%"),
    (r"^{\circ}", " degrees "),
    (r"^\circ", " degrees "),
    ("°", " degrees "),
    ("{,}", ","),
    (r"\!", ""),
    (r"\,", " "),
    (r"\;", " "),
    (r"\:", " "),
    (r"\ ", " "),
    ("~", " "),
    (r"\{", SET_OPENING),
    (r"\}", SET_CLOSING),
    (r"\cdot", "*"),
    (r"\times", "*"),
    ("×", "*"),
    ("·", "*"),
    ("−", "-"),
    (r"\pi", "π"),
    (r"\leqslant", "≤"),
    (r"\leq", "≤"),
    (r"\geqslant", "≥"),
    (r"\geq", "≥"),
    ("<=", "≤"),
    (">=", "≥"),
    (r"\infty", "∞"),
    (r"\cup", "∪"),
    (r"\pm", "±"),
    (r"\neq", "≠"),
)
_BEFORE_LETTERS: Final = tuple(
    (re.compile(re.escape(command) + "(?![A-Za-z])"), sign)
    for command, sign in ((r"\le", "≤"), (r"\ge", "≥"), (r"\lt", "<"), (r"\gt", ">"), (r"\ne", "≠"), (r"\in", "∈"))
)
_CURRENCY: Final = re.compile(r"^([-+]?)\s*(?:\\\$|\$)\s*(?=[0-9.\\])")
_ARGUMENT: Final = re.compile(r"\\(sqrt|arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|exp)\s+([A-Za-z0-9π])")
_FRACTION: Final = re.compile(r"\\frac\s*([A-Za-z0-9π])\s*([A-Za-z0-9π])")
_SHORT_SCRIPT: Final = re.compile(r"([_^])\s*([0-9A-Za-zπ])")


def plain_text(answer: str) -> str:
    """Return an answer without typesetting; commands that have no plain form stay."""
    text = _CURRENCY.sub(r"\1¤", _unwrap(answer.strip()))
    for old, new in _REPLACEMENTS:
        text = text.replace(old, new)
    for pattern, sign in _BEFORE_LETTERS:
        text = pattern.sub(sign, text)
    text = _CURRENCY.sub(r"\1¤", _unwrap(drop_wrappers(text).strip()))
    if text.startswith(("¤", "-¤", "+¤")):
        text = text.replace("¤", "", 1) + " dollars"
    text = _ARGUMENT.sub(r"\\\1{\2}", _FRACTION.sub(r"\\frac{\1}{\2}", text))
    return _SHORT_SCRIPT.sub(r"\1{\2}", text.replace(r"\$", "").strip().rstrip(".").strip())


def is_text(answer: str) -> bool:
    r"""Return whether an answer is one \text{...} command and nothing else, so that its letters are a word."""
    bare = _unwrap(answer.strip())
    for name in _WRAPPERS:
        command = f"\\{name}{{"
        if name not in ("boxed", "fbox") and bare.startswith(command):
            return braced(bare, len(command) - 1)[1] == len(bare)
    return False


def _unwrap(text: str) -> str:
    """Remove the mathematics delimiters around the whole text."""
    for opening, closing in _DELIMITERS:
        inside = text[len(opening) : -len(closing)]
        if (
            text.startswith(opening)
            and text.endswith(closing)
            and not text.endswith(f"\\{closing}")
            and len(text) > len(opening + closing)
            and closing not in inside.replace(r"\$", "")
        ):
            return inside.strip()
    return text


def drop_wrappers(text: str) -> str:
    r"""Replace every command that only sets its argument in another font: \text{cm} becomes ' cm'."""
    for name in _WRAPPERS:
        command = f"\\{name}{{"
        at = text.find(command)
        while at >= 0:
            inside, end = braced(text, at + len(command) - 1)
            if inside is None:
                break
            text = f"{text[:at]} {inside}{text[end:]}"
            at = text.find(command)
    return text


def braced(text: str, opening: int) -> tuple[str | None, int]:
    """Return what the braces that open at an index contain, and the index behind them: None and the end if unclosed."""
    depth = 0
    for at in range(opening, len(text)):
        if text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return text[opening + 1 : at], at + 1
    return None, len(text)
