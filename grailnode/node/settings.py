"""The settings of a trainer, a coordinator and a site, from the sections of run.toml and from the run."""

import secrets
from collections.abc import Mapping
from typing import Final

from grailnode import UserError
from grailnode.config import Config, OuterMethod, OuterSection
from grailnode.node.run_model import reference_reader
from protocol.outer.round_records import RoundRules
from protocol.pseudogradient import AVERAGING, DILOCO, PULSELOCO_EXACT, PULSELOCO_GRID, SPARSELOCO, Kind, Method
from protocol.run import RunManifest
from roles.trainer.learn.learner import LearnerSettings
from roles.trainer.learn.loss.surrogates import surrogate_of
from roles.trainer.outer.coordinator import CoordinatorSettings
from roles.trainer.outer.local_steps import SiteSettings
from roles.trainer.publish.publisher import PublisherSettings

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
