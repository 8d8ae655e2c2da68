"""Which failures the operator can repair, and the line that tells how."""

import errno
from typing import Final

from grailnode import UserError
from grailnode.config import Config
from grailnode.node.process_launch import LostRankError
from protocol.environments.base import SandboxError
from protocol.errors import ProtocolError
from roles.ports import BeaconError, FencedError, RepairError, StateError, StoreError


class StateInUseError(UserError):
    """Another process of this name runs on this state."""


_SHORTAGES: Final = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_ROLE_ERRORS: Final = (RepairError, StateError, StoreError, BeaconError, FencedError)
_ONE_LINE_ERRORS: Final = (UserError, ProtocolError, SandboxError, *_ROLE_ERRORS)
"""What rooms of this program call repairable, and the errors of protocol and roles, whose text is a line as well."""


def with_repair_command(line: str, config: Config, name: str) -> str:
    """Return a line in which the command that repairs a node's state is whole."""
    file = config.at("run.toml")
    command = f"grailnode repair --run {file if file.is_file() else 'RUN'} --name {name}"
    return line.replace("`grailnode repair`", f"`{command}`")


def is_transient(error: BaseException) -> bool:
    """Whether starting again may help: storage, beacon or a host failed, or this machine was short of something."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_transient(inner) for inner in error.exceptions)
    return isinstance(error, StoreError | BeaconError | LostRankError) or (
        isinstance(error, OSError) and error.errno in _SHORTAGES
    )


def explain(error: BaseException) -> str | None:
    """Return the line to print; empty for an interruption, None for a fault of this program with its traceback."""
    if isinstance(error, BaseExceptionGroup):
        lines = [explain(inner) for inner in error.exceptions]
        if any(line is None for line in lines):
            return None
        return next((line for line in lines if line), "")
    if isinstance(error, KeyboardInterrupt):
        return ""
    if isinstance(error, _ONE_LINE_ERRORS):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}" if error.filename else error.strerror.lower()
    return None


def fault_in(error: BaseException) -> BaseException:
    """Return the error itself for which `explain` has no line; of a group, the first such error in it."""
    while isinstance(error, BaseExceptionGroup):
        error = next(inner for inner in error.exceptions if explain(inner) is None)
    return error
