"""grailnode for other programs: a trainer of one's own, and verified weights (docs/guide/own-trainer.md).

with open_trainer("run.toml") as trainer:
    trainer.publish("step_120/", step=120)
    for group in trainer.groups(min_count=16):
        ...
    trainer.acknowledge(groups)

for version in follow("https://.../runs/ID"):
    model.load_state_dict(version.weights)
"""

from grailnode.library.followed_run import FollowedVersion, follow
from grailnode.library.trainer import Group, Trainer, TrainerEndedError, open_trainer

__all__ = ["FollowedVersion", "Group", "Trainer", "TrainerEndedError", "follow", "open_trainer"]
