"""The program: everything that touches the world. Any room may import this package's one class.

Other programs use `grailnode.open_trainer` and `grailnode.follow`, or those of trio with `_async` (grailnode/library).
"""

import importlib
from typing import Any


class UserError(Exception):
    """A failure that the operator can repair: its text is one line that says what is wrong, where, and what to do."""


def __getattr__(name: str) -> Any:
    """Return what grailnode/library offers; it imports torch, for which the command line must not wait."""
    if name in ("follow", "follow_async", "open_trainer", "open_trainer_async"):
        return getattr(importlib.import_module("grailnode.library"), name)
    raise AttributeError(name)
