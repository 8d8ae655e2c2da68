"""What a run's environment needs beside its name, a file of problems and a sandbox: checked before a run is made, found
before a node joins it, or refused in one line.
"""

from pathlib import Path
from typing import Final

from grailnode import UserError
from grailnode.engine.policy import Policy
from grailnode.sandbox import BubblewrapSandbox
from protocol import environments, limits
from protocol.digest import content_digest
from protocol.environments import Requirements, Sandbox
from protocol.environments.dataset import Dataset
from protocol.errors import ProtocolError
from protocol.run import FileRef, RunManifest

DATA: Final = "data.jsonl"
"""What a run's data file is called, whatever its founder called it."""

_SHOWN: Final = 40


class RequirementError(UserError):
    """What an environment needs is not here, or not fit for it: says what, where, and what to do."""


def check(environment: str, data: Path | None, policy: Policy, max_tokens: int) -> Dataset | None:
    """Refuse choices that make no run, before it is made.

    Args:
        data: the file of problems; None for none.
        max_tokens: the longest completion.

    Returns:
        The problems of the file.

    Raises:
        ProvisionError: an unknown environment, a file too many or too few, or one that this policy cannot be trained
            on.
    """
    if needed(environment).data != (data is not None):
        raise RequirementError(
            f"environment {environment!r} "
            + (
                "takes its problems from a data file: --data FILE"
                if data is None
                else "takes no data file: drop --data"
            )
        )
    if data is None:
        return None
    try:
        problems = environments.dataset(environment, _read(data))
    except ProtocolError as error:
        raise RequirementError(f"{data}: {error}") from error
    _check_prompts(data, problems, policy, max_tokens)
    return problems


def needed(environment: str) -> Requirements:
    """What an environment needs.

    Raises:
        ProvisionError: this program does not know it.
    """
    try:
        return environments.requirements(environment)
    except ValueError as error:
        raise RequirementError(str(error)) from error


def _check_prompts(path: Path, problems: Dataset, policy: Policy, max_tokens: int) -> None:
    """Refuse prompts that the policy cannot read or has no room for: a miner would only find out in mid-run."""
    room = policy.config.get("max_position_embeddings")
    most = min(limits.MAX_PROMPT_TOKENS, room - max_tokens if isinstance(room, int) else limits.MAX_PROMPT_TOKENS)
    unknown = policy.tokenizer.unknown
    for problem in problems.problems:
        tokens = policy.tokenizer.encode(problem.prompt)
        which = f"{path}: the problem {problem.prompt[:_SHOWN]!r}..."
        if unknown is not None and unknown in tokens:
            raise RequirementError(
                f"{which} has characters that the policy's tokenizer does not know; give a policy that reads text: --policy DIR"
            )
        if len(tokens) > most:
            raise RequirementError(
                f"{which} is {len(tokens)} tokens long, and with completions of up to {max_tokens} the policy has room for "
                f"{max(0, most)}; leave it out, or lower --max-tokens"
            )


def reference(data: Path | None) -> FileRef | None:
    """How a run manifest names a data file.

    Raises:
        ProvisionError: it cannot be read.
    """
    if data is None:
        return None
    content = _read(data)
    return FileRef(name=DATA, digest=content_digest(content), size=len(content))


def published(run: RunManifest, data: Path | None) -> dict[str, bytes]:
    """The data file that a trainer has to publish, by name; nothing where the run has none.

    Args:
        data: where the operator says that it lies.

    Raises:
        ProvisionError: it is not there, or not the file that the run names.
    """
    if run.data is None:
        return {}
    if data is None:
        raise RequirementError("this run has a data file, and run.toml does not say where: set [trainer] data")
    content = _read(data)
    if content_digest(content) != run.data.digest:
        raise RequirementError(
            f"{data}: not the data file of this run (SHA-256 {content_digest(content).hex()[:16]}, the run's is "
            f"{run.data.digest.hex()[:16]}): put the original back, or make another run with this one"
        )
    return {run.data.name: content}


def open_sandbox(run: RunManifest) -> Sandbox | None:
    """The sandbox that a miner or validator of a run needs, tried out; None where its environment runs no programs.

    Raises:
        SandboxError: it cannot be had here.
        ProvisionError: this program does not know the environment.
    """
    python = needed(run.environment).python
    return BubblewrapSandbox.open(python) if python else None


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > limits.MAX_DATA_BYTES:
            raise RequirementError(f"{path}: {size} bytes, more than {limits.MAX_DATA_BYTES}; leave some problems out")
        return path.read_bytes()
    except OSError as error:
        raise RequirementError(
            f"{path}: the data file cannot be read ({(error.strerror or str(error)).lower()})"
        ) from error
