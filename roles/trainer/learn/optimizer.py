"""Optimizers of torch and of bitsandbytes over FP32 masters, of which the published weights are the rounding.

They take one tensor after the other, so that Muon may have the matrices and AdamW the rest, and no copy of all
gradients is needed to widen them. A step smaller than half a BF16 unit in the last place stays in the master, and its
BF16 rounding changes only when enough of them have added up. The sparsity of patches comes from this (PULSE, A.2).

AdamW is the function of torch and not its class: the first `torch.optim.Optimizer` of a process imports the compiler
`torch._dynamo`, which takes a second and 150 MB. The function also takes a tensor block by block, so that no temporary
tensor is as large as the largest one.

What is written out here: the norm of the gradients, which ranks with parts of them have to compute alike, and the state
as tensors by name, because checkpoints are files of some tensors each.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from protocol.quantization import is_matrix
from roles.trainer.learn.training_settings import OptimizerSettings

MASTER: Final = "master/"
STEPS: Final = "steps"
_STEP: Final = "step"  # the count of steps in the state of an optimizer
_BLOCK: Final = 1 << 20
"""Elements of a tensor that are computed at a time."""


class MasterOptimizer:
    """FP32 masters, contiguous, which `step` changes in place, with the optimizer's state, or the rows of them that one
    of several ranks has. Of these, `add_over_ranks` returns the exact sum of the numbers of all, `gather` the whole
    tensor of which each has rows, by the name of its weight, and `own_rows` those of a whole tensor.
    """

    def __init__(
        self,
        masters: Mapping[str, Tensor],
        settings: OptimizerSettings,
        add_over_ranks: Callable[[Sequence[float]], float] = math.fsum,
        gather: Callable[[str, Tensor], Tensor] = lambda _, own: own,
        own_rows: Callable[[Tensor], Tensor] = lambda whole: whole,
    ) -> None:
        self._settings = settings
        self._add_over_ranks, self._gather, self._own_rows = add_over_ranks, gather, own_rows
        self.masters = masters
        # On a CPU `fused` rounds the last elements of a tensor otherwise: ranks with parts of it would not agree with
        # one process that has all of it. Nobody has shown yet that GPUs round alike, so it is off there, too.
        self._constants: dict[str, Any] = dict.fromkeys(("foreach", "fused", "amsgrad", "maximize"), False)
        self._constants |= {"beta1": settings.beta1, "beta2": settings.beta2, "eps": settings.epsilon}
        self._constants |= {"weight_decay": settings.weight_decay}
        self._optimizers = _optimizers(masters, settings)
        self._states: dict[str, dict[str, Tensor]] = {}
        self.steps = 0
        for name, master in masters.items():
            self._states[name] = {key: torch.zeros_like(master) for key in ("exp_avg", "exp_avg_sq")}
            if name in self._optimizers:  # a step of size 0 makes the state, which is zero
                self._states[name] = _take_step(self._optimizers[name], master, torch.zeros_like(master), 0.0, {})

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last step; 0 before the first."""
        return self._settings.learning_rate * self._settings.share(self.steps) if self.steps else 0.0

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor]) -> float:
        """Update the masters with gradients by name, and return the gradients' L2 norm before clipping. Gradients in
        float32 are clipped in place. ValueError if one is missing, or the norm is not finite; nothing has changed.
        """
        if gradients.keys() != self.masters.keys():
            raise ValueError(f"gradients do not match the weights: {sorted(gradients.keys() ^ self.masters.keys())}")
        squares = torch.stack([_sum_of_squares(gradient) for gradient in gradients.values()])
        norm = float(torch.tensor(math.sqrt(self._add_over_ranks(squares.tolist())), dtype=torch.float32))
        if not norm < float("inf"):
            raise ValueError(f"the gradient's norm is {norm}")
        self.steps += 1
        scale = min(1.0, self._settings.max_grad_norm / norm) if norm > 0 else 1.0
        for name, gradient in gradients.items():
            self._step(name, gradient, self.learning_rate, scale)
        return norm

    def _step(self, name: str, gradient: Tensor, rate: float, scale: float) -> None:
        own, gradient = [self.masters[name], *self._states[name].values()], gradient.contiguous()
        if name in self._optimizers:  # each rank computes the step of all rows, and keeps its own
            widened = self._gather(name, gradient.to(torch.float32).mul_(scale))
            master, *moments = whole = [self._gather(name, tensor) for tensor in own]
            state = {**dict(zip(self._states[name], moments, strict=True)), _STEP: self.steps - 1}
            _take_step(self._optimizers[name], master, widened, rate, state)
            for tensor, result in zip(own, whole, strict=True):
                tensor.copy_(self._own_rows(result))
            return
        vectors = (tensor.view(-1).split(_BLOCK) for tensor in (gradient, *own))  # type: ignore[no-untyped-call]
        for part, block, average, square in zip(*vectors, strict=True):
            steps = torch.tensor(float(self.steps - 1))  # before this one: `adamw` counts it
            widened = part.to(torch.float32).mul_(scale)
            adamw([block], [widened], [average], [square], [], [steps], lr=rate, **self._constants)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Masters and state by name, on the device; `step` changes them in place."""
        tensors = {MASTER + name: master for name, master in self.masters.items()}
        for name, state in self._states.items():
            tensors |= {f"{key}/{name}": tensor for key, tensor in state.items()}
        return tensors

    def state(self) -> dict[str, Tensor]:
        """Return masters, state and step count by name: contiguous copies on the CPU."""
        copies = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in self.tensors.items()}
        return copies | {STEPS: torch.tensor(self.steps, dtype=torch.int64)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over a saved state, bit for bit; ValueError if it is none of these weights: nothing has changed."""
        tensors = self.tensors
        check_state(state, {name: (own.shape, own.dtype) for name, own in tensors.items()})
        for name, own in tensors.items():
            own.copy_(state[name])
        self.steps = int(state[STEPS])


def check_state(state: Mapping[str, Tensor], outline: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
    """Raise ValueError for a saved state whose tensors have other names, shapes or dtypes than the outline."""
    others = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items() if name != STEPS}
    if STEPS not in state or others != outline:
        raise ValueError("a saved state of another model or optimizer")


def _optimizers(masters: Mapping[str, Tensor], settings: OptimizerSettings) -> dict[str, torch.optim.Optimizer]:
    """Return a library's optimizer by the tensors that it takes, one after the other: Muon the matrices of layers."""
    nothing, decay = [torch.empty(0, 0)], settings.weight_decay
    if settings.optimizer == "muon":
        muon = torch.optim.Muon(nothing, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        return {name: muon for name, master in masters.items() if is_matrix(name, master.shape)}
    if settings.optimizer != "adamw-8bit":
        return {}
    from bitsandbytes.optim import AdamW8bit  # noqa: PLC0415 - the package of an extra

    betas = settings.beta1, settings.beta2
    return dict.fromkeys(masters, AdamW8bit(nothing, betas=betas, eps=settings.epsilon, weight_decay=decay))


def _take_step(
    optimizer: torch.optim.Optimizer, master: Tensor, gradient: Tensor, rate: float, state: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Change a tensor and its state in place. Return the tensors of the state, which begins if it is empty."""
    optimizer.param_groups[0] |= {"params": [master], "lr": rate}
    optimizer.state.clear()
    optimizer.state[master] |= state
    master.grad = gradient
    optimizer.step()
    master.grad = None
    return {key: tensor for key, tensor in optimizer.state.pop(master).items() if key != _STEP}


def _sum_of_squares(gradient: Tensor) -> Tensor:
    """Return the sum of a gradient's squares: float64, on its device.

    Squares of float32 are exact in float64, so that the norm, rounded to float32, does not depend on the order of the
    sum but where it is within about 1e-15 of a rounding boundary. So ranks with parts of a gradient agree with one that
    has all of it.
    """
    blocks = gradient.reshape(-1).split(_BLOCK)  # type: ignore[no-untyped-call]
    return torch.stack([block.to(torch.float64).square_().sum() for block in blocks]).sum()
