"""Serves the adapters of a LoRA run by vLLM's own LoRA layers (docs/spec/lora.md).

The layers keep one adapter, and its tensors are patched in place like those of a model. vLLM would multiply B by
alpha / rank when it loads an adapter, and what a layer then has would be no BF16 tensor of the chain. So an adapter is
loaded with the factor 1, and the layers apply the run's factor where they compute. vLLM's own reload of an adapter
(`load_inplace`) reads a whole one from files, and has no way back.
"""

import os
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

NAME: Final = "grailnode"  # of the adapter, which a request gives as its model
SCALE: Final = "GRAILNODE_LORA_SCALE"  # the variable with alpha / rank, with which vLLM records graphs when it starts

_ID: Final = 1  # that vLLM's server gives to the first adapter that is announced to it


def scale_adapters() -> None:
    """Have the LoRA layers of this process multiply by the run's factor, if there is one; called once in a process."""
    if SCALE not in os.environ:
        return
    from vllm.platforms import current_platform  # noqa: PLC0415 - vLLM is loaded by now
    from vllm.utils.import_utils import resolve_obj_by_qualname  # noqa: PLC0415

    factor = float(os.environ[SCALE])
    kernels = resolve_obj_by_qualname(current_platform.get_punica_wrapper())
    compute = kernels.add_lora_linear

    def add_lora_linear(
        self: Any, y: Tensor, x: Tensor, down: Any, up: Any, scale: float, *others: Any, **named: Any
    ) -> Any:
        return compute(self, y, x, down, up, scale * factor, *others, **named)

    kernels.add_lora_linear = add_lora_linear


def load_adapter(runner: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Have vLLM load an adapter, BF16 and by PEFT's names, in place of the one before."""
    from vllm.lora.lora_model import LoRAModel  # noqa: PLC0415 - only in LoRA runs
    from vllm.lora.peft_helper import PEFTHelper  # noqa: PLC0415

    adapters = dict(tensors)
    rank = min(min(tensor.shape) for tensor in adapters.values())
    # With alpha = rank, vLLM takes B as it is.
    helper = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
    manager, mapper = runner.lora_manager._adapter_manager, getattr(runner.get_model(), "hf_to_vllm_mapper", None)
    loaded = LoRAModel.from_lora_tensors(
        *(_ID, adapters, helper, "cpu", torch.bfloat16),
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    manager.remove_adapter(_ID)
    manager.add_adapter(loaded)
    manager.activate_adapter(_ID)


def adapter_loader(runner: Any) -> tuple[Any, list[Tensor]]:
    """Return what loads an adapter into a model runner, and the memory of its LoRA layers."""
    stacks = [getattr(layer, f"lora_{part}_stacked", ()) for layer in runner.get_model().modules() for part in "ab"]
    return partial(load_adapter, runner), [tensor for stack in stacks for tensor in stack]
