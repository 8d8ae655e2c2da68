"""The commands by which a node controls the weights inside of vLLM, each a JSON object in and out.

vLLM mixes `WorkerExtension` into its worker, and `/collective_rpc` calls its one method. Long work (decoding a patch,
reading all tensors back) runs in a thread beside the serving, and the node asks for its state. A commit runs in the
worker's own thread, between two steps of the model, so no step sees half of a version.
"""

import base64
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Literal

import numpy as np
import torch
import vllm

from grailnode.engine.vllm.inside import hidden_taps
from grailnode.engine.vllm.inside.adapters import adapter_loader, scale_adapters
from grailnode.engine.vllm.inside.plain_weights import keep_plain_weights, weights_changed
from grailnode.engine.vllm.inside.rank_steps import Cancelled, Job, Values, rank_gather
from grailnode.engine.vllm.inside.request_records import records
from grailnode.engine.vllm.inside.row_sampling import probe_draws
from grailnode.engine.vllm.inside.served_weights import ServedWeights, ServedWeightsError, StagedVersion
from grailnode.engine.vllm.inside.staging import stage_patch, stage_weights
from grailnode.engine.vllm.inside.tensor_map import map_tensors
from protocol.rollout.sampling import triton_fault

_MAX_THREADS: Final = 4
_COMMANDS: Final = frozenset(("ping", "describe", "map", "upload", "stage", "verify", "state", "commit", "take"))

# vLLM imports this in each worker, before it loads a model.
keep_plain_weights()
scale_adapters()


def _threads() -> int:
    """Return how many tensors are staged or written at the same time: one processor stays for the serving."""
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) - 1))


class WeightSession:
    """The control of the weights of one worker of vLLM."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._runner = worker.model_runner
        hidden_taps.install(self._runner)
        self._served: ServedWeights | None = None
        self._staged: StagedVersion | None = None
        self._job: Job | None = None
        self._directory = tempfile.TemporaryDirectory(prefix="grailnode-")

    def describe(self) -> Values:
        """Return what the node checks at start: version, device, dtype, and tokens drawn by this process's kernel."""
        config = self._worker.vllm_config
        device = next(self._runner.get_model().parameters()).device
        return {
            "vllm": vllm.__version__,
            "device": str(device),
            "capability": torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            "batch_invariant": bool(int(os.environ.get("VLLM_BATCH_INVARIANT", "0"))),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "head": self._head_dtype(),
            "quantization": config.model_config.quantization,
            "cache": config.cache_config.cache_dtype,
            "matmul": torch.get_float32_matmul_precision(),
            "processor": records.has_processor,
            "speculative": config.speculative_config is not None,
            "pipeline_parallel": config.parallel_config.pipeline_parallel_size,
            "data_parallel": config.parallel_config.data_parallel_size,
            "probe": probe_draws(device),
            "triton_fault": triton_fault(device) if device.type == "cuda" else "",
        }

    def _head_dtype(self) -> str:
        """Return the dtype of the logits: as the model's layer says, or else the model's."""
        # Only an output projection whose dtype was overridden has a `head_dtype`.
        dtypes = (getattr(layer, "head_dtype", None) for layer in self._runner.get_model().modules())
        dtype = next(filter(None, dtypes), self._worker.vllm_config.model_config.dtype)
        return str(dtype).removeprefix("torch.")

    def map(self, shapes: dict[str, list[int]], adapters: bool = False) -> Values:
        """Find the places of a policy's tensors, or of adapters of the weights that were mapped and verified before."""
        # A job reads the weights that a new map replaces.
        self._stop_job()
        model = self._runner.get_model()
        ranks = self._worker.vllm_config.parallel_config.world_size
        table = {name: tuple(shape) for name, shape in shapes.items()}
        base, adapter = (self._weights(), adapter_loader(self._runner)) if adapters else (None, None)
        gather = rank_gather() if ranks > 1 else None
        self._served = ServedWeights(map_tensors(model, table, whole=ranks == 1, adapter=adapter), gather, base)
        # From here on nothing that is sampled counts, until a version was committed and verified.
        records.version = None
        records.clear()
        return {}

    def upload(self, name: str, data: str, first: bool) -> Values:
        """Append base64 bytes to a temporary file here, for a node that shares no directory with this machine."""
        # Only the last part of the name, so that a caller cannot write elsewhere.
        path = self._path(Path(name).name)
        with path.open("wb" if first else "ab") as file:
            file.write(base64.b64decode(data))
        return {}

    def stage(self, version: int, digest: str, path: str, kind: Literal["patch", "weights"]) -> Values:
        """Begin to stage a version from a file: a patch, or a whole checkpoint in safetensors."""
        engine_weights, file, expected = self._weights(), self._path(path), bytes.fromhex(digest)
        # The job that is under way may stage an older version; two would write `_staged` in any order.
        self._stop_job()
        self._staged = None

        def work(cancelled: Cancelled) -> Values:
            try:
                if kind == "patch":
                    patch = file.read_bytes()
                    self._staged = stage_patch(engine_weights, version, patch, expected, cancelled, _threads())
                else:
                    self._staged = stage_weights(engine_weights, version, file, expected, cancelled)
            finally:
                # The node uploads it again for another try, and what is mapped of it stays.
                if file.parent == self._path(""):
                    file.unlink(missing_ok=True)
            return {}

        self._job = Job(work)
        return {}

    def verify(self, version: int, digest: str) -> Values:
        """Begin to read all tensors back."""
        engine_weights = self._weights()
        self._stop_job()

        def work(cancelled: Cancelled) -> Values:
            try:
                engine_weights.verify(version, bytes.fromhex(digest))
            finally:
                # Also after a failure: tokens that are drawn now must not carry a version that was just found wrong.
                records.version = engine_weights.version
            return {"tensors": len(engine_weights.placements)}

        self._job = Job(work)
        return {}

    def ping(self) -> Values:
        return {}

    def state(self) -> Values:
        """Return the state of the job that was begun last."""
        return self._job.state() if self._job is not None else {}

    def commit(self, version: int) -> Values:
        """Write the staged version; the node has paused the engine. It can be staged and committed once."""
        # No job of another call may read together with other ranks while these agree.
        self._stop_job()
        start, engine_weights = perf_counter(), self._weights()
        # Forgotten before the write, so that a commit of which nobody knows the outcome cannot be repeated.
        staged, self._staged = self._staged, None
        try:
            with torch.inference_mode():
                is_staged = staged is not None and staged.version == version
                engine_weights.commit(staged if is_staged else None, _threads())
        finally:
            weights_changed()
            # The records of requests under way end here: a completion may not span two versions.
            records.version = engine_weights.version
            records.clear()
        return {"seconds": perf_counter() - start, "verified": engine_weights.version == version}

    def take(self, requests: list[str], abandoned: Sequence[str] = ()) -> Values:
        """Return the records of finished requests, arrays as base64; forget them and those of abandoned ones."""
        records.forget(abandoned)
        result: Values = {}
        for request in requests:
            # A record is handed out once. A request that vLLM never began has none.
            record = records.take(request)
            if record is not None:
                arrays = {name: value for name, value in record.items() if isinstance(value, np.ndarray)}
                record |= {name: base64.b64encode(value.tobytes()).decode() for name, value in arrays.items()}
            result[request] = record
        return result

    def _path(self, name: str) -> Path:
        """Return a file that was uploaded, by its name, or one of this machine, by its absolute path."""
        return Path(self._directory.name) / name

    def _weights(self) -> ServedWeights:
        if self._served is None:
            raise ServedWeightsError("the tensors of the policy are not mapped yet")
        return self._served

    def _stop_job(self) -> None:
        if self._job is not None:
            self._job.stop()
            self._job = None


_sessions: dict[int, WeightSession] = {}


class WorkerExtension:
    """Answers the commands of a node."""

    def grailnode(self, command: str, arguments: str = "{}") -> Values:
        """Carry out a command of WeightSession; return its value, or the error, as an exception would end vLLM."""
        try:
            if command not in _COMMANDS:
                raise ValueError(f"{command}: no such command")
            # vLLM makes the worker, into which this class is mixed without an __init__ of its own.
            if id(self) not in _sessions:
                _sessions[id(self)] = WeightSession(self)
            return {"value": getattr(_sessions[id(self)], command)(**json.loads(arguments))}
        except Exception as error:  # noqa: BLE001 - see above
            tensors = list(getattr(error, "tensors", ()))
            return {"error": str(error) or type(error).__name__, "kind": type(error).__name__, "tensors": tensors}
