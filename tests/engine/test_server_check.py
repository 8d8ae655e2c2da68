"""A server of vLLM that does not fit is refused in one line, before it gets a weight."""

from typing import Any

import pytest
import torch

from grailnode.engine.vllm.server_check import check_description
from roles.ports import EngineError
from tests.engine.vllm_site import fitting_description


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"device": "cuda:0", "capability": [7, 5]},
        {"device": "cuda:0", "capability": [8, 0], "batch_invariant": True},
        {"device": "cuda:0", "capability": [10, 0], "batch_invariant": True},
    ],
)
def test_a_server_that_fits(changes: dict[str, Any]):
    check_description(fitting_description(**changes), torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"vllm": "0.28.0"}, "versions from 0.29 to below 0.33 fit"),
        ({"vllm": "0.33.0rc1"}, "versions from 0.29 to below 0.33 fit"),
        ({"vllm": "nightly"}, "versions from 0.29 to below 0.33 fit"),
        ({"dtype": "float16"}, "it computes in float16, and engine.dtype is bfloat16"),
        ({"head": "bfloat16"}, "it computes logits in bfloat16, and margins need float32"),
        ({"quantization": "fp8"}, "it serves fp8-quantized weights"),
        ({"processor": False}, "it has not loaded our logits processor; start it as `grailnode engine flags` prints"),
        ({"speculative": True}, "speculative decoding"),
        ({"batch_invariant": True}, "VLLM_BATCH_INVARIANT is set, and it computes on cpu"),
        (
            {"batch_invariant": True, "device": "cuda:0", "capability": [7, 5]},
            "GPUs of compute capability 8.0 and more",
        ),
        ({"probe": [0, 1, 2, 3]}, "its noise has other bits"),
    ],
)
def test_a_server_that_does_not_fit(changes: dict[str, Any], line: str):
    with pytest.raises(EngineError) as refusal:
        check_description(fitting_description(**changes), torch.bfloat16)
    assert line in str(refusal.value)
    assert "\n" not in str(refusal.value)
