"""Keeps the weights of a CPU in the layout of the checkpoint, so that a patch can be written into them.

On a CPU, vLLM copies the weights of linear layers into a layout of oneDNN or of its own kernels when the model has been
loaded: some parameters become empty, and the output projection computes from a copy that no later change reaches. So
this turns the copies off before a model is loaded. Experts are computed by plain matrix products for the same reason.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm.platforms import current_platform


def keep_plain_weights() -> None:
    """Turn off all re-packing of weights in this process. On a GPU, vLLM packs no unquantized weights."""
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
    try:
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe  # noqa: PLC0415
    except ImportError:
        return
    experts = cpu_moe.CPUUnquantizedExperts
    # The layer's own tensors stay as the loader made them, and `_compute_experts` reads them.
    experts.process_weights_after_loading = lambda self, layer: None
    experts._supports_grouped_gemm = classmethod(lambda cls, config: (True, None))
    experts.apply = _compute_experts


def _compute_experts(
    self: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    *arguments: Any,
    **keywords: Any,
) -> None:
    """Compute the experts of each token with plain matrix products.

    Args:
        output: [T, D], result.
        hidden_states: [T, D].
        w1: [E, 2F, D], gate and up projections; w2: [E, D, F].
        topk_weights: float32 [T, K]; topk_ids: int [T, K].
    """
    if activation.value != "silu" or self.w1_bias is not None:
        raise NotImplementedError(f"experts with activation {activation.value} or biases, on a CPU")
    skip_weights = keywords.get("apply_router_weight_on_input", arguments[-1] if arguments else False)
    output.zero_()
    # In order of their number, so that the sums of a token's experts do not depend on the batch.
    for expert in sorted(set(topk_ids.flatten().tolist())):
        # For each of the expert's tokens: the token's row, and which of its K choices the expert is.
        rows, places = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(hidden_states[rows], w1[expert]).chunk(2, dim=-1)
        result = functional.linear(functional.silu(gate) * up, w2[expert])
        if not skip_weights:
            result = result * topk_weights[rows, places, None].to(result.dtype)
        output.index_add_(0, rows, result.to(output.dtype))


def unpacked(model: torch.nn.Module) -> bool:
    """Return whether no parameter of a model was emptied by a re-packing."""
    return all(parameter.numel() for parameter in model.parameters())
