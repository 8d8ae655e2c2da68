"""Lossless patches from one version of the weights to the next (docs/spec/patch.md). Imports kernels."""

from protocol.patch.applying import NewTensors, StreamingApply, apply, apply_with_digests, check_container, check_frames
from protocol.patch.codec import EncodedTensor, PatchEncoder, encode, summary
from protocol.patch.container import PROFILES, Mode, split_parts
from protocol.patch.values import copy_bits

__all__ = [
    "PROFILES",
    "EncodedTensor",
    "Mode",
    "NewTensors",
    "PatchEncoder",
    "StreamingApply",
    "apply",
    "apply_with_digests",
    "check_container",
    "check_frames",
    "copy_bits",
    "encode",
    "split_parts",
    "summary",
]
