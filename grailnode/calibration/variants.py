"""The ways in which honest nodes compute one policy differently, and the pairs of them that occur in a run."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
import trio

from grailnode import UserError
from grailnode.engine.lora_model import LoraModel
from grailnode.engine.models import build
from grailnode.engine.policy import Policy
from grailnode.engine.qwen3 import Attention
from grailnode.engine.torch_engine import DEFAULT_BATCH_TOKENS, TorchEngine
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ChildServer
from grailnode.engine.vllm.vllm_settings import VllmSettings
from protocol.digest import Weights
from protocol.lora import DOWN, PREFIX, UP, LoraSpec
from roles.policy.causal_model import CausalModel
from roles.ports import Engine

DType = Literal["float32", "bfloat16"]

SMALL_BATCH: Final = 512
FEW_SEQUENCES: Final = 8
"""Sequences that vLLM computes at a time, for a pair of other batches."""
ALONE: Final = 1
"""Value of `batch_tokens` for one sequence in each batch, without pads."""


@dataclass(frozen=True)
class Variant:
    """One way to compute a policy: padded tokens of one batch, and torch's fused attention or the formula."""

    dtype: DType = "float32"
    batch_tokens: int = DEFAULT_BATCH_TOKENS
    attention: Attention = "sdpa"
    threads: int = 1
    device: str = "cpu"

    def __str__(self) -> str:
        batch = "alone" if self.batch_tokens == ALONE else f"batches of {self.batch_tokens}"
        return (
            f"torch {self.dtype} {self.attention} on {self.device}, {batch}, "
            f"{self.threads} thread{'s' * (self.threads > 1)}"
        )

    def model(self, policy: Policy, lora: LoraSpec | None = None) -> CausalModel:
        """Return the architecture, computed this way, with `lora` where the weights have adapters beside a base."""
        return build(policy, torch.device(self.device), lora=lora, attention=self.attention)

    async def serve(self, policy: Policy, weights: Weights, lora: LoraSpec | None = None) -> TorchEngine:
        """Return an engine that computes this way and serves these weights as version 0."""
        return await self.host(self.model(policy, lora), weights)

    async def host(self, model: CausalModel, weights: Weights) -> TorchEngine:
        """Return an engine that computes a model this way and serves these weights as version 0."""
        engine = TorchEngine(
            model,
            device=self.device,
            dtype=getattr(torch, self.dtype),
            max_batch_tokens=self.batch_tokens,
            run_sync=_inline(self.threads),
        )
        await engine.stage(0, weights)
        await engine.commit()
        return engine


def _inline(threads: int) -> Callable[..., Awaitable[Any]]:
    """Return a `run_sync` that computes directly, with this number of torch threads."""

    async def run_sync(function: Callable[..., Any], *arguments: Any) -> Any:
        await trio.lowlevel.checkpoint()
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return function(*arguments)
        finally:
            torch.set_num_threads(before)

    return run_sync


@dataclass(frozen=True)
class VllmVariant:
    """The settings with which vLLM computes `sequences` at a time, by the interpreter of its environment."""

    python: Path
    directory: Path
    version: str
    dtype: str = "float32"
    device: str = "cpu"
    sequences: int = 256

    def __str__(self) -> str:
        return f"vllm {self.version} {self.dtype} on {self.device}, {self.sequences} sequences"


AnyVariant = Variant | VllmVariant
"""One side of a pair."""


class VllmServers:
    """The servers of a calibration, one for each variant of vLLM: a start takes much longer than new weights."""

    def __init__(self) -> None:
        self._engines: dict[tuple[VllmVariant, LoraSpec | None], VllmEngine] = {}
        self._versions: dict[tuple[VllmVariant, LoraSpec | None], int] = {}

    async def serve(
        self, variant: AnyVariant, policy: Policy, weights: Weights, lora: LoraSpec | None = None
    ) -> Engine:
        """Return an engine that computes as one side of a pair, and serves these weights, with adapters if there are
        some. An engine of vLLM is that of its variant, which serves them from now on; its base is that of the first.
        """
        if isinstance(variant, Variant):
            return await variant.serve(policy, weights, lora)
        model, key = build(policy, lora=lora), (variant, lora)
        if lora is not None:
            base = {name: tensor for name, tensor in weights.items() if not name.endswith((DOWN, UP))}
            weights = {PREFIX + name: tensor for name, tensor in weights.items() if name not in base}
            model = LoraModel(model, base, dtype=torch.bfloat16)
        if key not in self._engines:
            kind = "weights" if lora is None else "adapters"
            place = variant.directory / f"{variant.dtype}-{variant.sequences}-{kind}"
            settings = VllmSettings.model_validate(
                {name: getattr(variant, name) for name in ("python", "device", "dtype", "sequences")}
            )
            server = ChildServer(settings, policy.directory.absolute(), place / "server", lora)
            self._engines[key] = VllmEngine(model, server, place / "engine", dtype=getattr(torch, variant.dtype))
        engine, version = self._engines[key], self._versions.get(key, -1) + 1
        await engine.stage(version, weights)
        await engine.commit()
        self._versions[key] = version
        return engine

    async def close(self) -> None:
        for engine in self._engines.values():
            await engine.close()
        self._engines.clear()


class Pair(NamedTuple):
    """A miner's way to compute and the validator's way that checks it, with a name."""

    name: str
    generating: AnyVariant
    checking: AnyVariant


def run_pairs(generating: AnyVariant, checking: AnyVariant) -> tuple[Pair, ...]:
    """Return the pairs of a run with one way to generate and one to check, by batches, attention and threads."""
    pairs = [Pair("same", generating, checking)]
    if isinstance(generating, VllmVariant):
        pairs.append(Pair("small-batches", replace(generating, sequences=FEW_SEQUENCES), checking))
    else:
        pairs += [
            Pair("small-batches", replace(generating, batch_tokens=SMALL_BATCH), checking),
            Pair("alone-generated", replace(generating, batch_tokens=ALONE), checking),
            Pair("eager-generated", replace(generating, attention="eager"), checking),
        ]
        if generating.device == "cpu":
            pairs.append(Pair("two-threads", replace(generating, threads=2), checking))
    if isinstance(checking, Variant):
        pairs.append(Pair("alone-checked", generating, replace(checking, batch_tokens=ALONE)))
        pairs.append(Pair("eager-checked", generating, replace(checking, attention="eager")))
    return tuple(pairs)


def select(names: str, generating: AnyVariant, checking: AnyVariant) -> tuple[Pair, ...]:
    """Return the pairs that the command line names: "run" for all, or names separated by commas. A UserError for
    an unknown name lists all names.
    """
    by_name = {pair.name: pair for pair in run_pairs(generating, checking)}
    requested: Sequence[str] = list(by_name) if names == "run" else list(dict.fromkeys(names.split(",")))
    unknown = [name for name in requested if name not in by_name]
    if unknown:
        raise UserError(f"--pairs: no pair {unknown[0]!r}; there are: run, {', '.join(by_name)}")
    return tuple(by_name[name] for name in requested)
