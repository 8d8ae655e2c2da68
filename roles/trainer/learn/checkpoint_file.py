"""The checkpoint of the training process as a file: the learner's tensors, the replay buffer, and a version."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import safetensors.torch
import torch
from torch import Tensor

from protocol.digest import Weights
from roles.trainer.learn.optimizer import AdamW, AdamWSettings

_META: Final = "meta"
_LEARNER: Final = "learner/"
_REPLAY: Final = "replay/"


@dataclass(frozen=True)
class CheckpointFile:
    """What a checkpoint holds.

    Attributes:
        version: the version of the snapshot of the same moment.
        learner: the state of the learner; replay: that of the replay buffer, empty for a buffer without groups.
    """

    version: int
    learner: Mapping[str, Tensor]
    replay: Mapping[str, Tensor]

    def encode(self) -> bytes:
        """Return a safetensors file."""
        meta = bytearray(json.dumps({"version": self.version}).encode())
        return safetensors.torch.save(
            {_LEARNER + key: tensor for key, tensor in self.learner.items()}
            | {_REPLAY + key: tensor for key, tensor in self.replay.items()}
            | {_META: torch.frombuffer(meta, dtype=torch.uint8)}
        )

    @classmethod
    def decode(cls, data: bytes) -> "CheckpointFile":
        """Return the contents of a file that `encode` returned."""
        tensors = safetensors.torch.load(data)
        version = int(json.loads(bytes(tensors.pop(_META).numpy()))["version"])
        return cls(
            version,
            {key.removeprefix(_LEARNER): tensor for key, tensor in tensors.items() if key.startswith(_LEARNER)},
            {key.removeprefix(_REPLAY): tensor for key, tensor in tensors.items() if key.startswith(_REPLAY)},
        )

    @classmethod
    def from_weights(cls, version: int, weights: Weights) -> "CheckpointFile":
        """Return a checkpoint that begins with the weights of a version: no step taken, moments zero, no groups."""
        return cls(version, AdamW(weights, AdamWSettings()).state(), {})
