"""How much room a node needs on the disk of its state, and how much memory new programs can have."""

import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from grailnode import UserError
from grailnode.config import Config
from grailnode.engine import models
from grailnode.engine.policy import Policy
from protocol.lora import DOWN, UP, LoraSpec
from protocol.run import RunManifest

_CGROUPS: Final = Path("/sys/fs/cgroup")


def free_memory() -> int:
    available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert available is not None  # Linux 3.14 and later
    return min(int(available[1]) << 10, *_cgroup_rooms(), 1 << 62)


def _cgroup_rooms() -> Iterator[int]:
    """Yield the bytes that this process's cgroup, and each one around it, leaves free; nothing where none limits."""
    own = re.search(r"^0::/(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    directory = _CGROUPS / (own[1] if own else "")
    for cgroup in (directory, *directory.parents):
        if not cgroup.is_relative_to(_CGROUPS):
            return
        with suppress(OSError):  # a container sees only its own
            limit, used = ((cgroup / f"memory.{name}").read_text().strip() for name in ("max", "current"))
            cache = re.search(r"^inactive_file (\d+)", (cgroup / "memory.stat").read_text(), re.MULTILINE)
            if limit != "max":
                yield int(limit) - int(used) + (int(cache[1]) if cache else 0)


_SMALL_BYTES: Final = 64 << 20  # records, verdicts and groups of a few windows, and logs
_WEIGHT_BYTES: Final = 2  # of a parameter: BF16
_MASTER_BYTES: Final = 12  # of a parameter: FP32 master and two moments
_TRAINER_BYTES: Final = (
    2 * _MASTER_BYTES  # the checkpoint, and the next one while it is written
    + 2 * _WEIGHT_BYTES  # the newest published version, likewise
    + 2 * _WEIGHT_BYTES  # a version that waits for its upload, and the next one
    + _WEIGHT_BYTES  # an anchor that is being uploaded
)
_VLLM_BYTES: Final = 2 * _WEIGHT_BYTES  # of a parameter: the weights from which vLLM starts, and the next ones
_MIB: Final = 1 << 20


def trainer_bytes(policy: Policy, lora: LoraSpec | None = None) -> int:
    """Return the most bytes of a trainer's state, without its replay buffer; in a LoRA run it has only adapters."""
    return _SMALL_BYTES + _TRAINER_BYTES * parameters(policy, lora)


def follower_bytes(run: RunManifest, config: Config, policy: Policy | None, versions: int = 1) -> int:
    """Return the bytes that a miner's or a validator's state takes at most, with this number of versions; beside vLLM
    they lie on the disk, with two more while it catches up. The policy is None as long as the run's files have not been
    fetched.
    """
    files = [*run.model.files, *([run.data] if run.data is not None else [])]
    base = 0 if run.lora is None else run.lora.base_bytes
    weights = 0
    if config.engine.kind == "vllm" and policy is not None:
        replicas = config.engine.replicas
        weights = (replicas * _VLLM_BYTES + (versions + 2) * _WEIGHT_BYTES) * parameters(policy)
    return _SMALL_BYTES + base + sum(file.size for file in files) + weights


def check_disk(directory: Path, needed_bytes: int) -> None:
    """Raise UserError if the directory of a node's state cannot be written, or its disk has no room for so many bytes
    of the whole state, what is there already included.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"\0")
        free = shutil.disk_usage(directory).free
        own = sum(_disk_bytes(directory))
    except OSError as error:
        what = (error.strerror or type(error).__name__).lower()
        raise UserError(
            f"{directory}: this node's state cannot be written there ({what}); free space, mount the disk for writing, "
            "or give the directory to the user who runs the node"
        ) from error
    if free + own < needed_bytes:
        raise UserError(
            f"{directory}: {free // _MIB} MiB are free and {own // _MIB} MiB are this node's, where its state takes up "
            f"to {-(-needed_bytes // _MIB)} MiB with this model; free space, or move node.state"
        )


def parameters(policy: Policy, lora: LoraSpec | None = None) -> int:
    """Return the number of weights that versions have."""
    shapes = models.build(policy, lora=lora).shapes
    return sum(math.prod(shape) for name, shape in shapes.items() if lora is None or name.endswith((DOWN, UP)))


def _disk_bytes(directory: Path) -> Iterator[int]:
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                yield (Path(folder) / name).lstat().st_blocks * 512
            except FileNotFoundError:  # another process of the node has deleted it
                continue
