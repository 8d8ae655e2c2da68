"""What brings a restarted engine back to the version that it served: a checkpoint and the patches after it, on disk.

They are for this machine only. Digests are checked again where they are read, inside of vLLM.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from protocol.chain.safetensors import file_head
from protocol.digest import Weights, raw_bytes


@dataclass(frozen=True)
class RecoveryStep:
    """A file that brings the engine to a version by the command `stage` of inside/weight_session.py."""

    kind: Literal["weights", "patch"]
    version: int
    digest: bytes
    path: Path


class Checkpoints:
    """The files of one engine, in a directory of their own; whatever lies there from an earlier process is removed."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # Versions of an earlier process are worth nothing: the follower brings the newest one again.
        for path in (*directory.glob("weights-*"), *directory.glob("patch-*")):
            path.unlink()
        self._directory = directory
        self.steps: list[RecoveryStep] = []  # to the served version, in order
        self.staged: RecoveryStep | None = None  # what may be committed
        self._number = 0

    @property
    def serving(self) -> RecoveryStep | None:
        """The step to the served version; None before the first commit."""
        return self.steps[-1] if self.steps else None

    def write_weights(self, version: int, weights: Weights) -> Path:
        """Write whole weights; the file is complete when this returns."""
        head, names = file_head(weights)
        with self._new_file("weights", version) as path, path.open("wb") as output:
            output.write(head)
            for name in names:
                output.write(raw_bytes(weights[name]))
        return path

    def write_patch(self, version: int, patch: bytes) -> Path:
        with self._new_file("patch", version) as path:
            path.write_bytes(patch)
        return path

    def drop_staged(self) -> None:
        """Forget what is staged, with its file."""
        if self.staged is not None:
            self.staged.path.unlink(missing_ok=True)
            self.staged = None

    def commit(self) -> None:
        """Note that the staged version serves; a checkpoint makes what lies before it superfluous."""
        assert self.staged is not None
        step, self.staged = self.staged, None
        # A patch needs its predecessors for a restart, a checkpoint needs none.
        if step.kind == "weights":
            for old in self.steps:
                old.path.unlink(missing_ok=True)
            self.steps.clear()
        self.steps.append(step)

    @contextmanager
    def _new_file(self, kind: str, version: int) -> Iterator[Path]:
        """Yield the path of a file to write. One that cannot be completed, such as on a full disk, is removed."""
        # The number keeps the name apart from that of the same version staged before.
        self._number += 1
        path = self._directory / f"{kind}-{version}-{self._number}"
        try:
            yield path
        except BaseException:
            path.unlink(missing_ok=True)
            raise
