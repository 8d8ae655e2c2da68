"""What brings a restarted engine back to the version that it served: a checkpoint and the patches after it, on disk.

They are for this machine only. Digests are checked again where they are read, inside of vLLM. So that a restart takes
no longer after weeks, the patches are applied to the checkpoint from time to time, in a copy of its file.
"""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from safetensors import safe_open

from protocol.chain.safetensors import file_head
from protocol.digest import Weights, raw_bytes
from protocol.patch.applying import apply_unit
from protocol.patch.container import Mode, read_header, split_frames, units_of

MAX_PATCHES: Final = 64
"""Patches behind a checkpoint before they are applied to it."""


@dataclass(frozen=True)
class RecoveryStep:
    """A file that brings the engine to a version by a command of inside/weight_session.py."""

    command: Literal["stage_weights", "stage_patch"]
    version: int
    digest: bytes
    path: Path


class Checkpoints:
    """The files of one engine; whatever lies in the directory from an earlier process is removed.

    Args:
        directory: of these files alone.

    Attributes:
        steps: to the served version, in order.
        staged: the step that is staged; None if there is none.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # Versions of an earlier process are worth nothing: the follower brings the newest one again.
        for path in (*directory.glob("weights-*"), *directory.glob("patch-*")):
            path.unlink()
        self._directory = directory
        self.steps: list[RecoveryStep] = []
        self.staged: RecoveryStep | None = None
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

    def stage(self, step: RecoveryStep) -> None:
        """Note that a version is staged; what was staged before is dropped."""
        if self.staged is not None:
            self.staged.path.unlink(missing_ok=True)
        self.staged = step

    def commit(self) -> None:
        """Note that the staged version serves; a checkpoint makes what lies before it superfluous."""
        assert self.staged is not None
        step, self.staged = self.staged, None
        # A patch needs its predecessors for a restart, a checkpoint needs none.
        if step.command == "stage_weights":
            for old in self.steps:
                old.path.unlink(missing_ok=True)
            self.steps.clear()
        self.steps.append(step)

    def forget(self) -> None:
        """Note that what was brought into the engine last may not serve, and nothing else can."""
        self.steps.clear()

    def compact(self) -> None:
        """Apply the patches to the checkpoint, if there are many."""
        if len(self.steps) <= MAX_PATCHES:
            return
        last = self.steps[-1]
        # The new file is complete before the old ones go, so a restart always finds a way to the version.
        with self._new_file("weights", last.version) as path:
            shutil.copyfile(self.steps[0].path, path)
            _apply_to_file(path, (step.path.read_bytes() for step in self.steps[1:]))
        for old in self.steps:
            old.path.unlink()
        self.steps = [RecoveryStep("stage_weights", last.version, last.digest, path)]

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


def _apply_to_file(path: Path, patches: Iterable[bytes]) -> None:
    """Apply patches to the tensors in a safetensors file, whose pages are in memory as long as there is room."""
    with safe_open(path, framework="pt") as file:
        like = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is no mapping
    head, names = file_head(like)
    memory = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    parts = torch.split(memory[len(head) :], [like[name].nbytes for name in names])
    parts_of = zip(names, parts, strict=True)
    tensors = {name: part.view(like[name].dtype).view(like[name].shape) for name, part in parts_of}
    for patch in patches:
        header = read_header(patch)
        units = units_of(header.rows)
        for row, frame in zip(header.rows, split_frames(patch, header), strict=True):
            if row.mode not in (Mode.UNCHANGED, Mode.JOINED):
                apply_unit(tensors, units[row.name], frame, tensors)
