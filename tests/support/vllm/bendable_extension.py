"""A worker extension that damages weights, as memory that fails does, and tells how vLLM schedules. vLLM imports this
file.

With a file `exchanged` beside it, the kernel for experts reads their gate and up projections in the other order, as
those of FlashInfer do, and the one for adapters the rows of A.
"""

from pathlib import Path
from typing import Any

from torch import Tensor, cat
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from grailnode.engine.vllm.inside.request_records import records
from grailnode.engine.vllm.inside.weight_session import WorkerExtension, _sessions

_compute = CPUUnquantizedExperts.apply
_add_adapters = PunicaWrapperCPU.add_lora_linear


def _compute_exchanged(
    self: Any, output: Tensor, hidden_states: Tensor, w1: Tensor, *others: Any, **named: Any
) -> None:
    _compute(self, output, hidden_states, cat(w1.chunk(2, dim=1)[::-1], dim=1), *others, **named)


def _add_exchanged(self: Any, y: Tensor, x: Tensor, down: tuple[Tensor, ...], *others: Any, **named: Any) -> Any:
    return _add_adapters(self, y, x, tuple(part.flip(-2) for part in down), *others, **named)


if Path(__file__).with_name("exchanged").exists():
    CPUUnquantizedExperts.apply = _compute_exchanged
    PunicaWrapperCPU.add_lora_linear = _add_exchanged


class BendableExtension(WorkerExtension):
    """Our extension, and a way to change what it serves behind its back."""

    def bend(self, *names: str) -> dict[str, int]:
        """Change one bit of the first element of some tensors, which are served in float32."""
        for name in names:
            weights = _sessions[id(self)]._weights()
            owner = weights if name in weights.placements or weights.base is None else weights.base
            view = owner.placements[name].pieces[0].view
            view[(0,) * view.dim()] ^= 1 << 16
        return {"bent": len(names)}

    def scheduling(self) -> dict[str, int]:
        """Return whether vLLM begins a step before it knows the tokens of the last one, and how many records wait."""
        ahead = self.vllm_config.scheduler_config.async_scheduling  # type: ignore[attr-defined]
        return {"ahead": ahead, "records": len(records._records)}
