"""Tensors that lie in a file of this machine's disk and are mapped into memory.

The kernel writes them to the disk when memory is short, and reads them again when somebody uses them. So a node whose
engine has weights of its own, as vLLM has, needs no memory for those that it follows. A file has no name: it is gone
with the last of its tensors, or with the process, however that ends.
"""

import os
import tempfile
from pathlib import Path
from typing import Final

import torch

from protocol.digest import Weights
from roles.ports import StoreError

_ALIGNMENT: Final = 64  # bytes, at which each tensor begins


def mapped_tensors(directory: Path, like: Weights) -> dict[str, torch.Tensor]:
    """Return zeros in tensors of the names, dtypes and shapes of others, all of them in one new file."""
    places, end = {}, 0
    for name, tensor in like.items():
        places[name] = end
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    if not end:
        return {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in like.items()}
    memory = _map_file(directory, end)
    return {
        name: memory[begin : begin + like[name].nbytes].view(like[name].dtype).reshape(like[name].shape)
        for name, begin in places.items()
    }


def _map_file(directory: Path, size: int) -> torch.Tensor:
    """Return the bytes of a new file: uint8 [size].

    All of its blocks are reserved first. Otherwise a full disk would be noticed by a write to memory, which ends the
    process.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:  # torch raises the other where the kernel refuses to map the file
        raise StoreError(f"{directory}: no room for the weights of a version: {error}") from error
