"""grailnode for other programs: a trainer of one's own, and verified weights (docs/guide/own-trainer.md).

with open_trainer("run.toml") as trainer:
    trainer.publish("step_120/", step=120)
    for group in trainer.groups(min_count=16):
        ...
    trainer.acknowledge(groups)

for version in follow("https://.../runs/ID"):
    model.load_state_dict(version.weights)

Programs in trio have `open_trainer_async` and `follow_async`, with the same calls to await.
"""

from grailnode.library.followed_run import FollowedVersion, follow, follow_async
from grailnode.library.trainer import AsyncTrainer, Group, Trainer, TrainerEndedError, open_trainer, open_trainer_async

__all__ = [
    "AsyncTrainer",
    "FollowedVersion",
    "Group",
    "Trainer",
    "TrainerEndedError",
    "follow",
    "follow_async",
    "open_trainer",
    "open_trainer_async",
]
