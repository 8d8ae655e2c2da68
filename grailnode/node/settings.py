"""The settings of a trainer, from the sections of run.toml and the run's sampling."""

from dataclasses import dataclass, field

from grailnode.config import Config
from protocol.rollout.sampling import SamplingParams
from roles.trainer.collect.collector import CollectorSettings
from roles.trainer.learn.learner import LearnerSettings
from roles.trainer.learn.training_settings import ReplaySettings, TrainingSettings
from roles.trainer.publish.publisher import PublisherSettings


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
        training=section,
        learner=LearnerSettings(
            temperature=sampling.temperature,
            filters=sampling.filters,
            max_tokens=sampling.max_tokens,
            stops=sampling.stops,
            max_batch_tokens=config.engine.max_batch_tokens,
            logits_chunk=section.logits_chunk,
            loss=section,
            optimizer=section,
        ),
        replay=section,
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
