"""A worker extension that damages weights, as memory that fails does, and tells how vLLM schedules. vLLM imports this
file.
"""

from grailnode.engine.vllm.inside.request_records import records
from grailnode.engine.vllm.inside.worker_extension import WorkerExtension, _sessions


class BendableExtension(WorkerExtension):
    """Our extension, and a way to change what it serves behind its back."""

    def bend(self, *names: str) -> dict[str, int]:
        """Change one bit of the first element of some tensors, which are served in float32."""
        for name in names:
            view = _sessions[id(self)]._weights().placements[name].pieces[0].view
            view[(0,) * view.dim()] ^= 1 << 16
        return {"bent": len(names)}

    def scheduling(self) -> dict[str, int]:
        """Return whether vLLM begins a step before it knows the tokens of the last one, and how many records wait."""
        ahead = self.vllm_config.scheduler_config.async_scheduling  # type: ignore[attr-defined]
        return {"ahead": ahead, "records": len(records._records)}
