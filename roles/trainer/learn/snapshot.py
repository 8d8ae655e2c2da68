"""The trainer's tensors, copied off the device while the next step runs (PULSE, appendix H.3).

On a GPU the copy runs on a stream of its own into pinned memory that is used again: it waits for the work that was
queued when it began, and later work that writes the tensors must call `wait_before_writing` first, which makes the GPU
wait, not the host. Without a GPU a snapshot is a plain copy, and its own.
"""

from collections.abc import Mapping
from typing import Any

import torch

_cuda: Any = torch.cuda  # its classes are untyped


class Snapshot:
    """A copy under way. `tensors` waits for it."""

    def __init__(self, copies: Mapping[str, torch.Tensor], done: Any) -> None:
        self._copies = copies
        self._done = done

    @property
    def ready(self) -> bool:
        """Whether `tensors` would return at once."""
        return self._done is None or bool(self._done.query())

    def wait_before_writing(self) -> None:
        """Make the current stream wait for the copy, before work on it that writes the tensors (the optimizer's step)."""
        if self._done is not None:
            _cuda.current_stream().wait_event(self._done)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The copies: contiguous CPU tensors; from a GPU, good until the source's next snapshot begins."""
        if self._done is not None:
            self._done.synchronize()
        return dict(self._copies)


class SnapshotSource:
    """Takes snapshots of one set of tensors.

    Args:
        tensors: live; written in place.
        dtype: what they are rounded to; None: nothing.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
        self._tensors = dict(tensors)
        self._dtype = dtype
        self._device = next((t.device for t in self._tensors.values() if t.device.type == "cuda"), None)
        self._stream = _cuda.Stream(self._device) if self._device is not None else None
        self._pinned: dict[str, torch.Tensor] = {}

    def take(self) -> Snapshot:
        """Begin a snapshot of the tensors as the work queued so far leaves them. On a GPU the one before must have been
        read.
        """
        if self._stream is None:
            return Snapshot(self._copied(), None)
        self._pinned = self._pinned or self._room()
        self._stream.wait_stream(_cuda.current_stream(self._device))
        with torch.no_grad(), _cuda.stream(self._stream):
            for name, tensor in self._tensors.items():
                # Rounded on the device first, so that half the bytes cross the bus. The rounded copy belongs to the
                # copy stream.
                self._pinned[name].copy_(tensor.detach().to(self._dtype or tensor.dtype), non_blocking=True)
            done = _cuda.Event()
            done.record(self._stream)
        return Snapshot(self._pinned, done)

    def _copied(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor.detach().to("cpu", self._dtype or tensor.dtype, copy=True).contiguous()
            for name, tensor in self._tensors.items()
        }

    def _room(self) -> dict[str, torch.Tensor]:
        """Pinned memory, reserved when it is first needed."""
        return {
            name: torch.empty(tensor.shape, dtype=self._dtype or tensor.dtype, pin_memory=True)
            for name, tensor in self._tensors.items()
        }
