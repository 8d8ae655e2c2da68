"""The worker extension (`--worker-extension-cls grailnode.engine.vllm.inside.worker_extension.WorkerExtension`).

vLLM mixes it into its worker, and `/collective_rpc` calls its one method with strings.
"""

import json
from typing import Any, Final

from grailnode.engine.vllm.inside.plain_weights import keep_plain_weights
from grailnode.engine.vllm.inside.weight_session import WeightSession

keep_plain_weights()  # for a server whose operator did not install the plugin

COMMANDS: Final = frozenset(("ping", "describe", "map", "upload", "stage", "verify", "state", "commit", "take"))
_sessions: dict[int, WeightSession] = {}


class WorkerExtension:
    """Answers the commands of a node."""

    def grailnode(self, command: str, arguments: str = "{}") -> dict[str, Any]:
        """Carry out a command of WeightSession; return its value, or the error, as an exception would end vLLM."""
        try:
            if command not in COMMANDS:
                raise ValueError(f"{command}: no such command")
            if id(self) not in _sessions:
                _sessions[id(self)] = WeightSession(self)
            return {"value": getattr(_sessions[id(self)], command)(**json.loads(arguments))}
        except Exception as error:  # noqa: BLE001 - see above
            tensors = list(getattr(error, "tensors", ()))
            return {"error": str(error) or type(error).__name__, "kind": type(error).__name__, "tensors": tensors}
