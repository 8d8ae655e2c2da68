"""A server of vLLM: as a child process in an environment of its own, or somewhere else by its URL."""

import hashlib
import json
import os
import re
import secrets
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

import httpx
import trio

import grailnode
import protocol
from grailnode.engine.vllm.inside.adapters import SCALE
from grailnode.engine.vllm.server_launcher import ServerLauncher
from grailnode.engine.vllm.vllm_settings import VllmSettings
from protocol.lora import LoraSpec
from roles.ports import EngineError

_INSIDE: Final = "grailnode.engine.vllm.inside"
_PLUGIN: Final = "grailnode_guard"  # which changes nothing of what vLLM computes
_POLL_SECONDS: Final = 0.1
_LONGEST_PLACE: Final = 51  # bytes of the path of a directory in which a server's directory and its sockets fit
_LOG_LINES: Final = 12
_LOG_BYTES: Final = 1 << 20  # of a log that has grown for weeks
_ERROR: Final = re.compile(r"(?:.*\] )?(\w*(?:Error|Exception): .{1,300})")
_LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM reserves memory
_KEEP_SECONDS: Final = 3.0  # for which an idle connection is kept; vLLM closes it after 5 s


def write_modules(directory: Path) -> Path:
    """Write a directory for PYTHONPATH that has our packages, a plugin of vLLM among them, and nothing else of this
    environment; return it. Several processes may write it at once.
    """
    packages = [Path(package.__file__ or "").parent.resolve() for package in (grailnode, protocol)]
    # The directory's name depends on where the packages are: two installations may share a cache.
    places = hashlib.sha256("\n".join(map(str, packages)).encode()).hexdigest()[:16]
    modules = directory / f"modules-{places}"
    information = modules / f"{_PLUGIN}-0.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    for package in packages:
        with suppress(FileExistsError):
            (modules / package.name).symlink_to(package)
    _write_whole(information / "METADATA", f"Metadata-Version: 2.1\nName: {_PLUGIN}\nVersion: 0\n")
    entry_point = f"[vllm.general_plugins]\n{_PLUGIN} = {_INSIDE}.process_guard:guard\n"
    _write_whole(information / "entry_points.txt", entry_point)
    return modules


def _write_whole(path: Path, text: str) -> None:
    """Write a file that others may be reading: they see the old text or the new one."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


def cache_directory(python: Path, directory: Path) -> Path:
    """Return the directory for what vLLM's processes compile: in vLLM's environment, so that a new server compiles
    nothing again, or in the server's own, if there is no virtual environment or it cannot be written.
    """
    environment = python.absolute().parent.parent
    cache = environment / "grailnode-cache"
    if (environment / "pyvenv.cfg").is_file():
        with suppress(OSError):
            cache.mkdir(exist_ok=True)
            if os.access(cache, os.W_OK):
                return cache
    return directory / "kernels"


def error_in(log: str) -> str:
    """Return the error that ended vLLM, behind ": ", or "". The process that started the failing one writes last."""
    matches = [_ERROR.match(line) for line in log.splitlines()[:-_LOG_LINES] if " WARNING " not in line]
    errors = [match[1] for match in matches if match]
    return f": {errors[-1]}" if errors else ""


class ChildServer:
    """A server that this process starts, on a Unix socket that only its user can open.

    Its processes are a group of their own, and the kernel kills them when this process ends (inside/process_guard.py).
    They are forked from a launcher (server_launcher.py).

    The weights in `model`, a policy directory, are not read; `directory` has the log.
    """

    LOG: Final = "vllm.log"
    shares_files = True

    def __init__(self, settings: VllmSettings, model: Path, directory: Path, lora: LoraSpec | None = None) -> None:
        assert settings.python is not None
        self.settings = settings
        self._lora = lora
        self._python = settings.python
        self._model = model
        self._directory = directory
        self.log = directory / self.LOG
        self.socket = ""  # of the server that was started last
        self._launcher = ServerLauncher(self._spawn)
        self._socket_directory: tempfile.TemporaryDirectory[str] | None = None

    @property
    def process_id(self) -> int | None:
        return self._launcher.server_id

    async def start(self) -> None:
        """Return when the server answers; start it if it does not run."""
        # What stands in the log before this start says nothing about its failure.
        logged = self.log.stat().st_size if self.log.exists() else 0
        with trio.move_on_after(self.settings.start_seconds) as scope:
            if self.process_id is None:
                # A server that ended may have left processes of its group, which hold the GPU's memory.
                await self.stop()
                # the path of a Unix socket has at most 107 bytes, which a state directory may exceed; vLLM makes some
                # beside ours, with names of 36 characters
                place = None if len(os.fsencode(tempfile.gettempdir())) <= _LONGEST_PLACE else "/tmp"  # noqa: S108
                directory = tempfile.TemporaryDirectory(prefix="grailnode-", dir=place, ignore_cleanup_errors=True)
                self.socket = str(Path(directory.name) / secrets.token_hex(4))
                self._socket_directory = directory
                try:
                    await self._launcher.fork(self.flags(self.socket))
                except OSError as error:
                    raise EngineError(f"vLLM cannot be started: {error}") from error
                except EngineError as error:
                    raise EngineError(f"{error}:\n{self._last_lines()}") from error
            async with self.client(5.0, 1) as client:
                while await _health_problem(client):
                    if self.process_id is None:
                        cause = error_in(self._logged(logged))
                        raise EngineError(f"vLLM ended while it started{cause}:\n{self._last_lines()}")
                    await trio.sleep(_POLL_SECONDS)
        if scope.cancelled_caught:
            await self.stop()  # it may hang for ever
            seconds = f"{self.settings.start_seconds:g} s (engine.start_seconds)"
            raise EngineError(f"vLLM did not answer within {seconds}:\n{self._last_lines()}")

    async def stop(self) -> None:
        """End the server and all its processes, however they are; the launcher stays for the next start."""
        self._launcher.kill_server()
        self._remove_files()

    def close(self) -> None:
        """End the launcher, too. This may be called outside of an event loop."""
        self._launcher.close()
        self._remove_files()

    def _remove_files(self) -> None:
        """Remove what a killed server leaves behind (inside/launch.py)."""
        directory, self._socket_directory = self._socket_directory, None
        if directory is not None:
            directory.cleanup()
            for memory in Path("/dev/shm").glob(f"{Path(self.socket).name}*"):  # noqa: S108 - where it is on Linux
                with suppress(OSError):  # a stranger's, who has seen the name
                    memory.unlink()

    def client(self, seconds: float, connections: int) -> httpx.AsyncClient:
        """Return an HTTP client with so many seconds for an answer, and connections at the same time."""
        transport = httpx.AsyncHTTPTransport(uds=self.socket, limits=_limits(connections))
        return httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=_timeout(seconds))

    def flags(self, socket: str) -> list[str]:
        settings = self.settings
        device = ["--enforce-eager"]
        if settings.device != "cpu":
            device = ["--gpu-memory-utilization", str(settings.memory_share)]
        own = *server_flags(settings, self._model), *_lora_flags(self._lora)
        return ["--uds", socket, *own, *device, *settings.flags]

    def environment(self) -> dict[str, str]:
        """Return the environment of the child: this one's without its Python, and what vLLM needs."""
        settings, cache = self.settings, cache_directory(self._python, self._directory)
        # The paths of this environment would hide vLLM's own packages; with a key it would refuse our requests.
        omitted = "PYTHON", "VIRTUAL_ENV", "VLLM_API_KEY"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(omitted)}
        caches = (
            *("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"),
            *("FLASHINFER_WORKSPACE_BASE", "XDG_CACHE_HOME"),  # they are in the user's home by default
        )
        own = {"PYTHONPATH": str(write_modules(cache)), **dict.fromkeys(caches, str(cache))}
        if settings.device == "cpu":
            own |= {
                "VLLM_CPU_KVCACHE_SPACE": str(settings.cache_gib),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "TORCHDYNAMO_DISABLE": "1",
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            }
        elif ":" in settings.device:
            # vLLM takes the first GPUs that it sees.
            first = int(settings.device.partition(":")[2])
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            names = visible.split(",") if visible else list(map(str, range(first + settings.ranks)))
            own["CUDA_VISIBLE_DEVICES"] = ",".join(names[first : first + settings.ranks])
        if self._lora is not None:
            # vLLM's key of a compiled model lacks the factor, which is a constant in it.
            own["VLLM_CACHE_ROOT"] = str(cache / f"lora-{self._lora.scale!r}")
            own |= {SCALE: repr(self._lora.scale), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        return inherited | server_environment(settings) | own | {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}

    def _spawn(self) -> "subprocess.Popen[bytes]":
        self._directory.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [str(self._python), "-m", f"{_INSIDE}.launch"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.environment(),
                cwd=self._directory,
                start_new_session=True,
            )

    def _last_lines(self) -> str:
        lines = [line[:300] for line in self._logged().splitlines()[-_LOG_LINES:]]
        try:
            with suppress(FileNotFoundError), self.log.open("ab", buffering=0) as log:
                log.write(b"\n")
        except OSError as error:  # vLLM ends where it cannot write what it has to say
            lines.append(f"{self.log}: {error.strerror}")
        return "\n".join(lines)

    def _logged(self, begin: int = 0) -> str:
        """Return the end of the log, where vLLM says what went wrong, from a byte on at the earliest."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            log.seek(max(begin, log.seek(0, os.SEEK_END) - _LOG_BYTES))
            return log.read(_LOG_BYTES).decode(errors="replace")


class ExternalServer:
    """A server that somebody else runs, with the flags of `grailnode engine flags`.

    Whoever reaches its URL controls its weights: keep it on this machine or in a trusted network.
    """

    shares_files = False

    def __init__(self, url: str, start_seconds: float = 300.0) -> None:
        self._url = url
        self._start_seconds = start_seconds

    async def start(self) -> None:
        async with self.client(5.0, 1) as client:
            problem = "no answer"
            with trio.move_on_after(self._start_seconds):
                while problem := await _health_problem(client):
                    await trio.sleep(1.0)
                return
        raise EngineError(
            f"engine.url: {self._url} was not ready within {self._start_seconds:g} s (/health: {problem}); is vLLM "
            "running there?"
        )

    async def stop(self) -> None:
        """Do nothing: the server's operator starts and stops it."""

    def close(self) -> None:
        """Do nothing: nothing was started."""

    def client(self, seconds: float, connections: int) -> httpx.AsyncClient:
        timeout, limits = _timeout(seconds), _limits(connections)
        return httpx.AsyncClient(base_url=self._url, timeout=timeout, limits=limits, trust_env=False)


Server = ChildServer | ExternalServer


def server_flags(settings: VllmSettings, model: Path) -> list[str]:
    """Return the flags that any server of vLLM needs to be a grailnode engine."""
    return [
        *("--model", str(model)),
        # The files of the model are not read: weights come through `stage`, and are verified.
        *("--load-format", "dummy"),
        *("--dtype", settings.dtype),
        *(("--max-model-len", str(settings.max_tokens)) if settings.max_tokens else ()),
        *("--max-num-seqs", str(settings.sequences)),
        *("--tensor-parallel-size", str(settings.ranks)),
        *("--logits-processors", f"{_INSIDE}.sampling_{settings.runner}:SeedBoundSampling"),
        *("--worker-extension-cls", f"{_INSIDE}.weight_session.WorkerExtension"),
        # The run says how tokens are drawn, not a file beside the policy.
        *("--generation-config", "vllm"),
        # Other kernels for experts read them in another layout than that of the checkpoint (docs/adr/0351).
        *(("--moe-backend", "triton") if settings.device != "cpu" else ()),
        *("--hf-overrides", json.dumps(_overrides(model))),
        "--enable-scale-out",
        # Requests and answers have token ids alone.
        "--skip-tokenizer-init",
        "--disable-log-stats",
        # A line for each completion and for each poll of the node would fill the disk within weeks.
        "--disable-uvicorn-access-log",
    ]


def _lora_flags(lora: LoraSpec | None) -> list[str]:
    if lora is None:
        return []
    # vLLM compares the last part of a module's name; layers without an adapter keep one of zeros.
    modules = sorted({target.rpartition(".")[2] for target in lora.targets})
    rank = min((rank for rank in _LORA_RANKS if rank >= lora.rank), default=lora.rank)
    return ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank), "--lora-target-modules", *modules]


def server_environment(settings: VllmSettings) -> dict[str, str]:
    """Return the environment variables that any server of vLLM needs to be a grailnode engine."""
    return {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if settings.runner == "v2" else "0",
        "VLLM_PLUGINS": _PLUGIN,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _overrides(model: Path) -> dict[str, object]:
    """Return what vLLM needs in config.json: logits in float32, and the name of an architecture that a policy lacks."""
    overrides: dict[str, object] = {"head_dtype": "float32"}
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config.get("architectures"):
        return overrides
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: PLC0415 - slow

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type", ""))
    return overrides | ({"architectures": [name]} if isinstance(name, str) else {})


async def _health_problem(client: httpx.AsyncClient) -> str:
    """Return why a server is not ready: the status of its answer or the name of the error; empty if it is ready."""
    try:
        status = (await client.get("/health")).status_code
    except httpx.HTTPError as error:
        return type(error).__name__
    return "" if status == httpx.codes.OK else str(status)


def _limits(connections: int) -> httpx.Limits:
    return httpx.Limits(
        max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=_KEEP_SECONDS
    )


def _timeout(seconds: float) -> httpx.Timeout:
    # Completions wait for a free connection as long as it takes.
    return httpx.Timeout(seconds, connect=5.0, pool=None)
