"""AdamW over FP32 masters (Loshchilov & Hutter 2019), written out: it reads like the formula, its state is plain
tensors by name, and torch.optim would import torch's compiler at a cost of 1.8 CPU seconds (docs/log.md).

A step smaller than half a BF16 unit in the last place stays in the master, and its BF16 rounding changes only when
enough of them have added up. The sparsity of patches comes from this (PULSE, section A.2).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from roles.trainer.learn.optimizer_settings import AdamWSettings

_FIRST: Final = "first_moment/"
_SECOND: Final = "second_moment/"
MASTER: Final = "master/"
STEPS: Final = "steps"
_BLOCK: Final = 1 << 20
"""Elements of a tensor that are computed at a time, so that no copy is as large as the largest tensor."""


class AdamW:
    """FP32 masters with their moments, or the part of them that one of several ranks has.

    Args:
        weights: initial values of the masters, of any floating-point dtype; copied.
        masters: the masters themselves, float32, instead of copies of `weights`.
        add_over_ranks: returns the exact sum of numbers of all ranks, when each has called it with its own.

    Attributes:
        masters: the float32 weights; `step` changes them in place.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        settings: AdamWSettings,
        device: torch.device | None = None,
        *,
        masters: Mapping[str, Tensor] | None = None,
        add_over_ranks: Callable[[Sequence[float]], float] = math.fsum,
    ) -> None:
        self._settings = settings
        self._add_over_ranks = add_over_ranks
        self.steps = 0
        copies = {
            name: tensor.detach().to(device, torch.float32, copy=True).contiguous() for name, tensor in weights.items()
        }
        self.masters = copies if masters is None else dict(masters)
        self._first = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self._second = {name: torch.zeros_like(master) for name, master in self.masters.items()}

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last step; 0 before the first."""
        return self._settings.learning_rate * self._settings.share(self.steps) if self.steps else 0.0

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor]) -> float:
        """Update the masters with gradients by name, and return the gradients' L2 norm before clipping.

        Gradients of a lower precision are widened to float32 a block at a time.

        Raises:
            ValueError: a gradient is missing, or the norm is not finite; nothing has changed.
        """
        if gradients.keys() != self.masters.keys():
            raise ValueError(f"gradients do not match the weights: {sorted(gradients.keys() ^ self.masters.keys())}")
        squares = torch.stack([_sum_of_squares(gradient) for gradient in gradients.values()])
        norm = float(torch.tensor(math.sqrt(self._add_over_ranks(squares.tolist())), dtype=torch.float32))
        if not norm < float("inf"):
            raise ValueError(f"the gradient's norm is {norm}")
        s = self._settings
        self.steps += 1
        scale = min(1.0, s.max_grad_norm / norm) if norm > 0 else 1.0
        rate = s.learning_rate * s.share(self.steps)
        correction1, correction2 = 1 - s.beta1**self.steps, 1 - s.beta2**self.steps
        for name, master in self.masters.items():
            tensors = master, self._first[name], self._second[name], gradients[name].contiguous()
            blocks = (tensor.view(-1).split(_BLOCK) for tensor in tensors)  # type: ignore[no-untyped-call]
            for theta, m, v, gradient in zip(*blocks, strict=True):
                g = gradient.to(torch.float32) * scale
                m.mul_(s.beta1).add_(g, alpha=1 - s.beta1)
                v.mul_(s.beta2).addcmul_(g, g, value=1 - s.beta2)
                denominator = (v / correction2).sqrt_().add_(s.epsilon)
                theta.mul_(1 - rate * s.weight_decay).addcdiv_(m, denominator, value=-rate / correction1)
        return norm

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Masters and moments by name, on the device; `step` changes them in place."""
        parts = {MASTER: self.masters, _FIRST: self._first, _SECOND: self._second}
        return {prefix + name: tensor for prefix, tensors in parts.items() for name, tensor in tensors.items()}

    def state(self) -> dict[str, Tensor]:
        """Return masters, moments and step count by name: contiguous copies on the CPU."""
        copies = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in self.tensors.items()}
        return copies | {STEPS: torch.tensor(self.steps, dtype=torch.int64)}

    def restore(self, tensors: Mapping[str, Tensor], steps: int | None = None) -> None:
        """Take over some or all of the tensors of a saved state. With all of them, training goes on bit for bit.

        Args:
            tensors: some of those of `tensors`, by name, or a whole `state`.
            steps: the optimizer steps of the saved state; None for those in a whole `state`.

        Raises:
            ValueError: they are not tensors of these weights, or the step count is missing; nothing has changed.
        """
        own_tensors = self.tensors
        values = {name: tensor for name, tensor in tensors.items() if steps is not None or name != STEPS}
        for name, tensor in values.items():
            own = own_tensors.get(name)
            if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
                raise ValueError("a saved state of another model")
        if steps is None and (STEPS not in tensors or values.keys() != own_tensors.keys()):
            raise ValueError("a saved state of another model")
        for name, tensor in values.items():
            own_tensors[name].copy_(tensor)
        self.steps = int(tensors[STEPS]) if steps is None else steps


def _sum_of_squares(gradient: Tensor) -> Tensor:
    """Return the sum of a gradient's squares: float64, on its device.

    Squares of float32 are exact in float64, so that the norm, rounded to float32, does not depend on the order of the
    sum but where it is within about 1e-15 of a rounding boundary. So ranks with parts of a gradient agree with one that
    has all of it.
    """
    blocks = gradient.reshape(-1).split(_BLOCK)  # type: ignore[no-untyped-call]
    return torch.stack([block.to(torch.float64).square_().sum() for block in blocks]).sum()
