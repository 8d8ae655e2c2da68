"""The model of a run as a node computes it, the weights that its trainer begins with, and the settings of the roles.

In a LoRA run the base is a part of the model: a trainer has it in its policy's directory, other nodes fetch it once.
"""

import math
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import torch

from grailnode import UserError
from grailnode.config import Config, OuterMethod, OuterSection
from grailnode.engine import models
from grailnode.engine.lora_model import LoraModel, check_base_digest, read_adapters
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.run.base_files import fetch_base
from protocol.digest import Weights
from protocol.outer.round_records import RoundRules
from protocol.pseudogradient import AVERAGING, DILOCO, PULSELOCO_EXACT, PULSELOCO_GRID, SPARSELOCO, Kind, Method
from protocol.run import RunManifest
from roles.node.identity import Node
from roles.policy.causal_model import CausalModel
from roles.ports import EngineError
from roles.trainer.learn.learner import LearnerSettings
from roles.trainer.learn.loss.surrogates import surrogate_of
from roles.trainer.learn.training_settings import LARGE_MODEL
from roles.trainer.outer.coordinator import CoordinatorSettings
from roles.trainer.outer.local_steps import SiteSettings
from roles.trainer.publish.publisher import PublisherSettings

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BASE: Final = "base"
"""The directory in a node's state with the files of the base."""


def policy_directory(config: Config) -> Path:
    """Return the directory with version 0, or the base of a LoRA run: the packaged genesis, or the operator's own."""
    name = config.trainer.policy
    return PACKAGED_POLICY if name == "genesis" else config.at(Path(name))


def check_run_settings(config: Config, run: RunManifest, *, trains: bool) -> None:
    """Raise UserError for settings that cannot be used in a LoRA run or a quantized run; the engine of a node that
    `trains` is torch, whatever it says.
    """
    if run.lora is not None and config.engine.kind == "vllm" and not trains and config.engine.url:
        raise UserError(
            "engine.url: in a run of LoRA adapters a node starts vLLM itself, with the flags that the adapters need; "
            "drop it"
        )
    if trains and run.lora is not None and config.trainer.adapters is None:
        raise UserError(
            "trainer.adapters: missing; this run trains LoRA adapters, and run.toml does not say where those of "
            "version 0 are"
        )
    if trains and config.trainer.outer is not None and run.sites_refusal:
        raise UserError(f"trainer.outer: {run.sites_refusal}")


def check_device(name: str, option: str) -> None:
    """Raise UserError, which names the option, for a device that torch cannot use here."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # an unknown name, or a torch built without the device
        raise UserError(f"{option}: torch cannot use {name!r} here ({str(error).splitlines()[0]})") from None


def reference_reader(config: Config) -> Callable[[], Weights] | None:
    """Return a function that reads the weights of the loss's reference policy, and refuses those of other shapes; None
    where that is version 0. UserError if the run trains adapters.
    """
    if config.trainer.reference is None:
        return None
    if config.trainer.adapters is not None:
        raise UserError("trainer.reference: the reference of a run of LoRA adapters is version 0; drop it")
    return partial(_read_reference, config.at(config.trainer.reference), policy_directory(config))


def _read_reference(directory: Path, policy: Path) -> Weights:
    weights = load_weights(directory)
    try:
        models.check_fit(models.build(Policy.load(policy)).shapes, weights)
    except EngineError as error:
        raise UserError(f"trainer.reference: {directory}: {error}") from error
    return weights


def recomputes_layers(config: Config, directory: Path) -> bool:
    """Return whether a trainer recomputes the activations of the policy in a directory, or the base of adapters."""
    if config.trainer.recompute is not None:
        return config.trainer.recompute
    return sum(map(math.prod, models.file_shapes(directory).values())) >= LARGE_MODEL


def trainer_model(config: Config, run: RunManifest, directory: Path) -> CausalModel:
    """Return the model that a trainer computes, of the policy in a directory; UserError if it cannot pack."""
    device, dtype = torch.device(config.engine.device), DTYPES[config.engine.dtype]
    policy = Policy.load(directory)
    build = partial(models.build, policy, device, lora=run.lora)
    try:
        model = build(recompute=recomputes_layers(config, directory))
    except EngineError:
        if config.trainer.recompute:
            raise
        model = build()  # an architecture without a list of layers keeps its activations, whatever its size
    if config.trainer.packing:
        try:
            models.check_packing(policy, run.lora)
        except EngineError as error:
            raise UserError(f"trainer.packing: {error}; drop it") from error
    if run.lora is None:
        return model
    base = load_weights(directory)
    check_base_digest(base, run.lora, str(directory))
    return LoraModel(model, base, device, dtype)


def genesis_reader(config: Config, run: RunManifest, directory: Path) -> Callable[[], Weights]:
    """Return what reads the weights of version 0, not yet quantized: the policy's, or the first adapters."""
    check_run_settings(config, run, trains=True)
    if config.trainer.adapters is None or run.lora is None:
        return partial(load_weights, directory)
    return partial(read_adapters, config.at(config.trainer.adapters))


async def follower_model(node: Node, config: Config, policy: Policy, directory: Path, device: str) -> CausalModel:
    """Return the model that a miner or a validator computes; the base of a LoRA run is fetched to the directory."""
    lora = node.run.lora
    check_run_settings(config, node.run, trains=False)
    build = partial(models.build, policy, torch.device(device), lora=lora)
    model: CausalModel = await node.run_sync(build)  # it may import transformers
    if lora is None:
        return model
    base = await fetch_base(node, lora, node.authority.trainers, directory / BASE, model.shapes)
    # vLLM takes the base from a file, and has a copy of its own.
    dtype = torch.bfloat16 if config.engine.kind == "vllm" else DTYPES[config.engine.dtype]
    adapted: CausalModel = await node.run_sync(LoraModel, model, base, torch.device(device), dtype)
    return adapted


_POLLS: Final = 40
_METHODS: Final[Mapping[OuterMethod, Method]] = {
    "pulseloco": PULSELOCO_GRID,
    "pulseloco-exact": PULSELOCO_EXACT,
    "sparseloco": SPARSELOCO,
    "diloco": DILOCO,
    "averaging": AVERAGING,
}


def learner_settings(config: Config, run: RunManifest) -> LearnerSettings:
    """Return how a learner computes its steps, with probabilities as the run samples. UserError if a loss of one's own
    cannot be imported, or the run cannot have the reference policy.
    """
    section = config.trainer
    try:
        surrogate_of(section)
    except ValueError as error:
        raise UserError(f"trainer.loss: {error}") from error
    return LearnerSettings(
        sampling=run.sampling.params(),
        max_batch_tokens=config.engine.max_batch_tokens,
        ranks=section.ranks,
        logits_chunk=section.logits_chunk,
        packing=section.packing,
        loss=section,
        optimizer=section,
        read_reference=reference_reader(config),
    )


def publisher_settings(config: Config, run: RunManifest) -> PublisherSettings:
    """Return how a trainer publishes. Each start draws by how much its heads expire earlier; it is less than a second,
    because readers compute a head's age from its expiry.
    """
    section = config.trainer
    return PublisherSettings(
        anchor_interval=section.anchor_interval,
        keep_patches=section.keep_patches,
        keep_anchors=section.keep_anchors,
        expiry_offset_ms=secrets.randbelow(min(1000, run.head_ttl * 100)),
        profile=section.patch_profile,
        threads=config.engine.threads,
        part_bytes=section.file_bytes // 8,
    )


def coordinator_settings(config: Config, run: RunManifest) -> CoordinatorSettings:
    section = config.trainer.outer
    if section is None:
        raise UserError("trainer.outer: missing; without it the trainer trains alone (docs/guide/many-trainers.md)")
    return CoordinatorSettings(
        rules=_round_rules(section),
        beacon_rounds=section.round_windows * run.schedule.rounds,
        payload_seconds=section.payload_seconds,
        state_interval=section.state_interval,
        threads=config.engine.threads,
        poll_seconds=_poll_seconds(config, section, run),
    )


def _poll_seconds(config: Config, section: OuterSection, run: RunManifest) -> float:
    """Return how often storage is asked in a round: some dozens of times, since each question may cost money."""
    round_seconds = section.round_windows * run.schedule.rounds * run.beacon.period_ms / 1000
    return max(config.trainer.poll_seconds, round_seconds / _POLLS)


def _round_rules(section: OuterSection) -> RoundRules:
    method = _METHODS[section.method]
    values = method.coding.kind.name.lower()
    return RoundRules.model_validate(
        {
            "values": values,
            "fraction": section.fraction if method.coding.kind is Kind.GRID else 0,
            "chosen": section.chosen if method.coding.kind is Kind.CHUNKED else 0,
            "feedback_decay": method.feedback_decay,
            "frozen_steps": section.frozen_rounds,
            "momentum": method.momentum if section.momentum is None else section.momentum,
            "outer_rate": method.outer_rate if section.outer_rate is None else section.outer_rate,
            **section.model_dump(include={"local_steps", "quorum", "delay", "streams", "spread"}),
        }
    )


def site_settings(config: Config, run: RunManifest) -> SiteSettings:
    """Return a site's settings: those of a run.toml without [trainer.outer] are the defaults."""
    trainer = config.trainer
    section = trainer.outer or OuterSection()
    return SiteSettings(
        groups_per_step=trainer.groups_per_step,
        max_staleness=trainer.max_staleness,
        dynamic_filtering=trainer.filters_groups,
        upload_seconds=section.upload_seconds,
        file_bytes=trainer.file_bytes,
        threads=config.engine.threads,
        poll_seconds=_poll_seconds(config, section, run),
    )
