"""Seeds of rollouts."""

from protocol.rollout.challenge import rollout_seed
from tests.support.builders.samples import digest


def seeds(count: int, name: str = "seed") -> list[bytes]:
    """Return the seeds of a group's first rollouts, 16 bytes each."""
    group = digest(name)
    return [rollout_seed(group, index) for index in range(count)]
