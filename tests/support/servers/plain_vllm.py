"""The same vLLM without grailnode: what tests and benches compare with."""

from grailnode.engine.vllm.vllm_server import GUARD_PLUGIN, ChildServer


class PlainVllm(ChildServer):
    """A server that samples by itself: without our logits processor, worker extension and changes of vLLM."""

    def flags(self, socket: str) -> list[str]:
        """Return the flags without those that load our code."""
        words = super().flags(socket)
        for flag in ("--logits-processors", "--worker-extension-cls"):
            place = words.index(flag)
            del words[place : place + 2]
        return words

    def environment(self) -> dict[str, str]:
        """Return the environment with the guard of processes alone."""
        return super().environment() | {"VLLM_PLUGINS": GUARD_PLUGIN}
