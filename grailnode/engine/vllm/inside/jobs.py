"""Work of a worker that takes seconds, in a thread beside the serving."""

import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from grailnode.engine.vllm.inside.rank_steps import Cancelled

Values = dict[str, Any]


class Job:
    """Work in a thread, with its result when it is finished, or the error that ended it."""

    def __init__(self, work: Callable[[Cancelled], Values]) -> None:
        self._cancelled = threading.Event()
        self.result: Values | None = None
        self.error: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True, name="grailnode-job")
        self._thread.start()

    def _run(self) -> None:
        start = perf_counter()
        try:
            with torch.inference_mode():
                self.result = self._work(self._cancelled.is_set) | {"seconds": perf_counter() - start}
        except Exception as error:  # noqa: BLE001 - whatever it is, the node gets it as its answer
            self.error = error

    def stop(self) -> None:
        """End the work at its next tensor, on all ranks, and wait for that."""
        self._cancelled.set()
        self._thread.join()

    def state(self) -> Values:
        """Return the result, or that there is none yet."""
        if self.error is not None:
            raise self.error
        return self.result if self.result is not None else {"running": True}
