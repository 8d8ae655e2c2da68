"""What a poisoned site does with its update, base - local, before it encodes it."""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

Update = Mapping[str, Tensor]


class Scene:
    """What a poisoned site knows.

    Args:
        start: the shared weights with which the run began.
        seed: of its random numbers.
    """

    def __init__(self, start: Update, seed: int) -> None:
        self.start = start
        self.generator = torch.Generator().manual_seed(seed)
        self.direction = _scaled(self.noise(start), 1.0)
        self.updates: list[Update] = []  # that the site would have sent if it was honest

    def noise(self, like: Update) -> dict[str, Tensor]:
        """Return normal numbers of some shapes."""
        return {name: torch.randn(tensor.shape, generator=self.generator) for name, tensor in like.items()}


def length_of(update: Update) -> float:
    """Return the L2 norm."""
    return float(sum(float(tensor.double().square().sum()) for tensor in update.values()) ** 0.5)


def _scaled(update: Update, length: float) -> dict[str, Tensor]:
    factor = length / max(length_of(update), 1e-30)
    return {name: tensor * factor for name, tensor in update.items()}


def _times(factor: float) -> Callable[[Update, Scene], dict[str, Tensor]]:
    return lambda update, _: {name: factor * tensor for name, tensor in update.items()}


def _noise(update: Update, scene: Scene) -> dict[str, Tensor]:
    return _scaled(scene.noise(update), length_of(update))


def _one_tensor(update: Update, scene: Scene) -> dict[str, Tensor]:
    """All mass in the tensor with the most elements, in a direction that never changes."""
    name = max(update, key=lambda name: (update[name].numel(), name))
    only = {other: scene.direction[other] * (other == name) for other in update}
    return _scaled(only, length_of(update))


def _turned(share: float, towards: Callable[[Update, Scene], Update]) -> Callable[[Update, Scene], dict[str, Tensor]]:
    """Return an attack that turns an honest update by an angle whose sine is `share`, and keeps its length."""

    def attack(update: Update, scene: Scene) -> dict[str, Tensor]:
        length, direction = length_of(update), _scaled(towards(update, scene), 1.0)
        along = sum(float((update[name] * direction[name]).sum()) for name in update)
        honest = _scaled({name: update[name] - along * direction[name] for name in update}, (1 - share**2) ** 0.5)
        return _scaled({name: honest[name] + share * direction[name] for name in update}, length)

    return attack


def _replay(update: Update, scene: Scene) -> dict[str, Tensor]:
    """The site's first update that was not short, over and over again."""
    scene.updates.append(update)
    return dict(scene.updates[min(len(scene.updates) - 1, 3)])


def _growing(update: Update, scene: Scene) -> dict[str, Tensor]:
    scene.updates.append(update)
    return _turned(min(0.95, 0.01 * len(scene.updates)), lambda _, scene: scene.direction)(update, scene)


ATTACKS: Final[dict[str, Callable[[Update, Scene], dict[str, Tensor]]]] = {
    "sign flip": _times(-1.0),
    "times -10": _times(-10.0),
    "times 1000": _times(1000.0),
    "replay": _replay,
    "growing drift": _growing,
    "noise": _noise,
    "one tensor": _one_tensor,
    "drift of 0.2": _turned(0.2, lambda _, scene: scene.direction),
    "drift of 0.3": _turned(0.3, lambda _, scene: scene.direction),
    "drift of 0.4": _turned(0.4, lambda _, scene: scene.direction),
    "slow drift": _turned(0.5, lambda _, scene: scene.direction),
    "strong drift": _turned(0.95, lambda _, scene: scene.direction),
    "drift to zero": _turned(0.95, lambda _, scene: scene.start),
    "part-time slow drift": _turned(0.5, lambda _, scene: scene.direction),
    "part-time strong drift": _turned(0.95, lambda _, scene: scene.direction),
}
"""By name."""

PART_TIME: Final = frozenset({"part-time slow drift", "part-time strong drift"})
"""Attacks of a site that takes part in every second round alone."""
