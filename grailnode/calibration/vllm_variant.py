"""vLLM as one side of a pair: a server in an environment of its own, which serves whatever weights it is given."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from grailnode.engine.models import build
from grailnode.engine.policy import Policy
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ChildServer
from grailnode.engine.vllm.vllm_settings import VllmSettings
from protocol.digest import Weights

SMALL_BATCH: Final = 8
"""Sequences that vLLM computes at a time, for a pair of other batches."""


@dataclass(frozen=True)
class VllmVariant:
    """The settings with which vLLM computes a policy.

    Attributes:
        python: the interpreter of its environment.
        directory: for the server's files.
        version: of vLLM.
        dtype, device: of vLLM; sequences: that it computes at a time.
    """

    python: Path
    directory: Path
    version: str
    dtype: str = "float32"
    device: str = "cpu"
    sequences: int = 256

    def __str__(self) -> str:
        return f"vllm {self.version} {self.dtype} on {self.device}, {self.sequences} sequences"

    def in_small_batches(self) -> "VllmVariant":
        """Return the variant that computes few sequences at a time."""
        return replace(self, sequences=SMALL_BATCH)


class VllmServers:
    """The servers of a calibration, one for each variant: a start takes much longer than new weights."""

    def __init__(self) -> None:
        self._engines: dict[VllmVariant, VllmEngine] = {}
        self._versions: dict[VllmVariant, int] = {}

    async def serve(self, variant: VllmVariant, policy: Policy, weights: Weights) -> VllmEngine:
        """Return the engine of a variant, which serves these weights from now on."""
        if variant not in self._engines:
            place = variant.directory / f"{variant.dtype}-{variant.sequences}"
            settings = VllmSettings.model_validate(
                {name: getattr(variant, name) for name in ("python", "device", "dtype", "sequences")}
            )
            server = ChildServer(settings, policy.directory.absolute(), place / "server")
            self._engines[variant] = VllmEngine(
                build(policy), server, place / "engine", dtype=getattr(torch, variant.dtype)
            )
        engine, version = self._engines[variant], self._versions.get(variant, -1) + 1
        await engine.stage(version, weights)
        await engine.commit()
        self._versions[variant] = version
        return engine

    async def close(self) -> None:
        """Stop all servers."""
        for engine in self._engines.values():
            await engine.close()
        self._engines.clear()
