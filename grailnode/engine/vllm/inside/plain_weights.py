"""Keeps the weights of a CPU in the layout of the checkpoint, so that a patch can be written into them.

On a CPU, vLLM copies the weights of linear layers into a layout of oneDNN or of its own kernels when the model has been
loaded: some parameters become empty, and the output projection computes from a copy that no later change reaches. So
this turns the copies off before a model is loaded. Experts, whose kernel needs a copy, get a new one after each change.
"""

from collections.abc import MutableMapping
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import Tensor
from vllm.platforms import current_platform


def keep_plain_weights() -> None:
    """Turn off all re-packing of weights in this process on a CPU; elsewhere our flags do (vllm_server.py)."""
    if not current_platform.is_cpu():
        return
    from vllm import _custom_ops  # noqa: PLC0415 - only where it is a CPU
    from vllm.model_executor.layers import utils  # noqa: PLC0415

    # oneDNN and the SGL kernels keep a copy of a matrix in a layout of their own, which a patch in place would not
    # reach.
    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
    _keep_plain_experts()


def _keep_plain_experts() -> None:
    """Have vLLM's kernel for experts compute from packed copies, which are made again after each change."""
    try:
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe  # noqa: PLC0415
    except ImportError:
        return
    experts = cpu_moe.CPUUnquantizedExperts
    compute = experts.apply

    def apply(
        self: Any, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, *others: Any, **named: Any
    ) -> None:
        if self not in _packed_experts:
            _packed_experts[self] = [cpu_moe.cpu_prepack_moe_weight(weight, self.isa) for weight in (w1, w2)]
        compute(self, output, hidden_states, *_packed_experts[self], *others, **named)

    def keep(self: Any, layer: Any) -> None:
        # A padded tensor would have another shape than the one that its loader knows.
        if self._padded_intermediate_size(self.moe_config) != self.moe_config.intermediate_size_per_partition:
            raise ValueError(f"experts whose width is no multiple of {self._intermediate_alignment()}, on a CPU")

    # The layer's own tensors stay as the loader made them.
    experts.process_weights_after_loading = keep
    experts.apply = apply


_packed_experts: Final[MutableMapping[Any, list[Tensor]]] = WeakKeyDictionary()


def weights_changed() -> None:
    """Forget all copies of weights; the next step makes them again."""
    _packed_experts.clear()
