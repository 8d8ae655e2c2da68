"""Copies of the trainer's tensors, taken off the device while the next step runs (PULSE, appendix H.3).

On a GPU the copy runs on a stream of its own into pinned memory that every snapshot uses again. It waits for the work
that was queued when it began; later work that writes the tensors must call `wait_before_writing` first, which makes the
GPU wait and not the host. Without a GPU a snapshot is an ordinary copy with memory of its own.
"""

from collections.abc import Mapping
from typing import Any

import torch

_cuda: Any = torch.cuda  # its classes are untyped


class Snapshot:
    """A copy that may not have finished yet.

    Args:
        copies: the memory that is copied to.
        event: the CUDA event at the end of the copy; None for a copy that has finished.
    """

    def __init__(self, copies: Mapping[str, torch.Tensor], event: Any) -> None:
        self._copies = copies
        self._event = event

    @property
    def ready(self) -> bool:
        """Whether the copy has finished, so that `tensors` returns at once."""
        return self._event is None or bool(self._event.query())

    def wait_before_writing(self) -> None:
        """Make the current stream wait for the copy, before work that writes the tensors (an optimizer step)."""
        if self._event is not None:
            _cuda.current_stream().wait_event(self._event)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Wait for the copy, and return contiguous CPU tensors; from a GPU, valid until the source's next snapshot."""
        if self._event is not None:
            self._event.synchronize()
        return dict(self._copies)


class SnapshotSource:
    """Takes snapshots of one set of tensors.

    Args:
        tensors: the tensors by name; training writes them in place.
        dtype: to which a snapshot rounds them; None for no rounding.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
        self._tensors = dict(tensors)
        self._dtype = dtype
        self._device = next((t.device for t in self._tensors.values() if t.device.type == "cuda"), None)
        self._stream = _cuda.Stream(self._device) if self._device is not None else None
        self._pinned: dict[str, torch.Tensor] = {}

    def take(self) -> Snapshot:
        """Start a snapshot of the tensors as they are after all work that is queued now.

        On a GPU the previous snapshot must have been read.
        """
        if self._stream is None:
            return Snapshot(self._copy(), None)
        self._pinned = self._pinned or self._allocate()
        self._stream.wait_stream(_cuda.current_stream(self._device))
        with torch.no_grad(), _cuda.stream(self._stream):
            for name, tensor in self._tensors.items():
                # Rounded on the device first, so that half the bytes cross the bus. The rounded tensor is allocated on
                # the copy stream.
                self._pinned[name].copy_(tensor.detach().to(self._dtype or tensor.dtype), non_blocking=True)
            event = _cuda.Event()
            event.record(self._stream)
        return Snapshot(self._pinned, event)

    def _copy(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor.detach().to("cpu", self._dtype or tensor.dtype, copy=True).contiguous()
            for name, tensor in self._tensors.items()
        }

    def _allocate(self) -> dict[str, torch.Tensor]:
        """Allocate pinned memory for a snapshot."""
        return {
            name: torch.empty(tensor.shape, dtype=self._dtype or tensor.dtype, pin_memory=True)
            for name, tensor in self._tensors.items()
        }
