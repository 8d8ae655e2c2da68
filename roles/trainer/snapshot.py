"""The trainer's weights, copied off the device while the next step runs (PULSE, appendix H.3).

On a GPU the copy runs on a stream of its own into pinned memory that is used again: it waits for the work that was queued when
it began, and later work that writes the weights must call `wait_before_writing` first, which makes the GPU wait, not the host.
Without a GPU a snapshot is a plain copy.
"""

from collections.abc import Mapping
from typing import Any

import torch

_cuda: Any = torch.cuda  # its classes are untyped


class Snapshot:
    """A copy under way. `weights` waits for it."""

    def __init__(self, buffers: dict[str, torch.Tensor], done: Any) -> None:
        self._buffers = buffers
        self._done = done

    @property
    def ready(self) -> bool:
        """Whether `weights` would return at once."""
        return self._done is None or bool(self._done.query())

    def wait_before_writing(self) -> None:
        """Make the current stream wait for the copy, before work on it that writes the weights (the optimizer's step)."""
        if self._done is not None:
            _cuda.current_stream().wait_event(self._done)

    def weights(self) -> dict[str, torch.Tensor]:
        """The copied weights: contiguous CPU tensors, good until the snapshot after the next one begins."""
        if self._done is not None:
            self._done.synchronize()
        return self._buffers


class SnapshotSource:
    """Takes snapshots of one set of parameters, as `dtype`; holds two sets of buffers, so one can be read while the next fills."""

    def __init__(self, parameters: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> None:
        self._parameters = dict(parameters)
        self._dtype = dtype
        self._device = next((t.device for t in self._parameters.values() if t.device.type == "cuda"), None)
        self._stream = _cuda.Stream(self._device) if self._device is not None else None
        pinned = self._stream is not None
        self._buffers = [
            {name: torch.empty(t.shape, dtype=dtype, pin_memory=pinned) for name, t in self._parameters.items()}
            for _ in range(2)
        ]
        self._taken = 0

    def take(self) -> Snapshot:
        """Begin a snapshot of the parameters as the work queued so far leaves them."""
        buffers = self._buffers[self._taken % 2]
        self._taken += 1
        if self._stream is None:
            self._copy(buffers)
            return Snapshot(buffers, None)
        self._stream.wait_stream(_cuda.current_stream(self._device))
        with _cuda.stream(self._stream):
            self._copy(buffers)
            done = _cuda.Event()
            done.record(self._stream)
        return Snapshot(buffers, done)

    def _copy(self, buffers: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                # Rounded on the device first, so that half the bytes cross the bus. The rounded copy belongs to the copy stream.
                buffers[name].copy_(parameter.detach().to(self._dtype), non_blocking=self._stream is not None)
