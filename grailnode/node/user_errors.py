"""Which failures are a user's to mend, and what to tell them in one line."""

import errno

from grailnode.calibration.measure import CalibrationError
from grailnode.calibration.proof_file import ProofFileError
from grailnode.config import ConfigError
from grailnode.convert.conversion import ConversionError
from grailnode.engine.policy import PolicyError
from grailnode.node.supervisor import ProcessError
from grailnode.run.authority_drafts import RevisionError
from grailnode.run.buckets import BucketError
from grailnode.run.key_files import KeyFileError
from grailnode.run.requirements import RequirementError
from grailnode.run.workspace import WorkspaceError
from grailnode.store.credentials import CredentialsError
from protocol.environments.base import SandboxError
from protocol.errors import ProtocolError
from roles.ports import StoreError
from roles.trainer.publish.fencing import FencedError


class StateInUseError(Exception):
    """Another process of this name runs on this state."""


_SHORTAGES = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_TOLD = (
    BucketError,
    CalibrationError,
    ProofFileError,
    ConversionError,
    CredentialsError,
    FencedError,
    StateInUseError,
    ConfigError,
    KeyFileError,
    PolicyError,
    ProcessError,
    RequirementError,
    RevisionError,
    SandboxError,
    WorkspaceError,
    ProtocolError,
    StoreError,
)


def passing(error: BaseException) -> bool:
    """Whether starting again may help: it was the storage or what this machine had too little of, and nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return all(passing(inner) for inner in error.exceptions)
    return isinstance(error, StoreError) or (isinstance(error, OSError) and error.errno in _SHORTAGES)


def explain(error: BaseException) -> str | None:
    """The line to print; empty for an interruption; None for a fault of our own, whose traceback is wanted."""
    if isinstance(error, BaseExceptionGroup):
        lines = [explain(inner) for inner in error.exceptions]
        if any(line is None for line in lines):
            return None
        return next((line for line in lines if line), "")
    if isinstance(error, KeyboardInterrupt):
        return ""
    if isinstance(error, _TOLD):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}" if error.filename else error.strerror.lower()
    return None
