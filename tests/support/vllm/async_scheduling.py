"""A plugin of vLLM that schedules on a CPU as vLLM does on a GPU: the next step is sent to the worker before the tokens
of the last one are known. vLLM imports this file, in each of its processes.
"""

import contextlib
from typing import Any

import torch
from vllm.platforms import current_platform


def register() -> None:
    """Turn async scheduling on, after the platform has turned it off, and give torch the streams that it needs."""
    platform = type(current_platform)
    update = platform.check_and_update_config

    def update_and_schedule_ahead(vllm_config: Any) -> None:
        update(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = staticmethod(update_and_schedule_ahead)
    cuda: Any = torch.cuda
    cuda.Event = cuda.Stream = cuda.current_stream = Placeholder
    cuda.stream = contextlib.nullcontext


class Placeholder:
    """Stands for an event or a stream of a GPU: a CPU has computed everything by the time that it is waited for."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.device = torch.device("cpu")

    def _do_nothing(self, *arguments: Any, **keywords: Any) -> None:
        """Return at once."""

    record = synchronize = wait = wait_event = wait_stream = record_event = _do_nothing
