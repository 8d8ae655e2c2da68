"""Translates the sections of run.toml into the settings of the roles."""

from dataclasses import dataclass, field

from grailnode.config import Config, TrainerSection
from protocol.rollout.sampling import SamplingParams
from roles.miner.miner import MinerSettings
from roles.trainer.collect.collector import CollectorSettings
from roles.trainer.learn.learner import LearnerSettings
from roles.trainer.learn.learning_rate import RateSchedule
from roles.trainer.learn.loss.policy_loss import LossSettings
from roles.trainer.learn.loss.surrogates import ClipSettings
from roles.trainer.learn.optimizer import AdamWSettings
from roles.trainer.learn.replay_buffer import ReplaySettings
from roles.trainer.learn.training import TrainingSettings
from roles.trainer.publish.publisher import PublisherSettings
from roles.validator.validator import ValidatorSettings


@dataclass(frozen=True)
class TrainerSettings:
    """All settings of a trainer that its operator decides."""

    training: TrainingSettings
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    publisher: PublisherSettings = field(default_factory=PublisherSettings)
    collector: CollectorSettings = field(default_factory=CollectorSettings)
    seed: int = 0


def trainer_settings(config: Config, sampling: SamplingParams) -> TrainerSettings:
    """Return a trainer's settings.

    Args:
        sampling: how the run samples rollouts; the learner computes probabilities in the same way.
    """
    section = config.trainer
    return TrainerSettings(
        training=TrainingSettings(
            section.groups_per_step,
            section.steps_per_version,
            training_steps=section.training_steps,
            checkpoint_versions=section.checkpoint_versions,
            checkpoint_seconds=section.checkpoint_seconds,
        ),
        learner=LearnerSettings(
            temperature=sampling.temperature,
            filters=sampling.filters,
            max_tokens=sampling.max_tokens,
            stops=sampling.stops,
            max_batch_tokens=config.engine.max_batch_tokens,
            logits_chunk=section.logits_chunk,
            loss=_loss_settings(section),
            optimizer=_optimizer_settings(section),
        ),
        replay=ReplaySettings(
            section.replay_bytes, section.decay, section.max_staleness, section.max_uses, section.dynamic_filtering
        ),
        publisher=PublisherSettings(
            anchor_interval=section.anchor_interval,
            keep_patches=section.keep_patches,
            keep_anchors=section.keep_anchors,
            profile=section.patch_profile,
            threads=config.engine.threads,
        ),
        collector=CollectorSettings(poll_seconds=section.poll_seconds, canaries=section.canaries),
        seed=section.seed,
    )


def _loss_settings(section: TrainerSection) -> LossSettings:
    return LossSettings(
        name=section.loss,
        clip=ClipSettings(section.clip_low, section.clip_high, section.truncation),
        kl_coefficient=section.kl_coefficient,
        advantage=None if section.advantage == "of-loss" else section.advantage,
        overlong_filtering=section.overlong_filtering,
    )


def _optimizer_settings(section: TrainerSection) -> AdamWSettings:
    return AdamWSettings(
        learning_rate=section.learning_rate,
        schedule=RateSchedule(section.schedule, section.warmup_steps, section.training_steps, section.final_share),
        beta1=section.beta1,
        beta2=section.beta2,
        epsilon=section.epsilon,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
    )


def miner_settings(config: Config) -> MinerSettings:
    """Return a miner's settings."""
    section = config.miner
    return MinerSettings(section.groups, section.chunk, section.share, section.poll_seconds)


def validator_settings(config: Config) -> ValidatorSettings:
    """Return a validator's settings."""
    return ValidatorSettings(config.validator.evaluate, config.validator.poll_seconds)
