"""A worker extension that damages weights, as memory that fails does. vLLM imports this file."""

from grailnode.engine.vllm.inside.worker_extension import WorkerExtension, _sessions


class BendableExtension(WorkerExtension):
    """Our extension, and a way to change what it serves behind its back."""

    def bend(self, *names: str) -> dict[str, int]:
        """Change one bit of the first element of some tensors, which are served in float32."""
        for name in names:
            view = _sessions[id(self)]._weights().placements[name].pieces[0].view
            view[(0,) * view.dim()] ^= 1 << 16
        return {"bent": len(names)}
