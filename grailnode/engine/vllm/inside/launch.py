"""Starts servers of vLLM: `python -m grailnode.engine.vllm.inside.launch`.

Importing vLLM takes most of a server's start, three times over: in the server, in its engine core and in the worker. So
this process imports it once, and forks a server for each line that it reads: the flags, a JSON array. It answers with
the id of the server's process, which leads a session of its own, and waits for its end. A server that crashed is
replaced by one that has nothing to import. It shares this process's memory until it changes it.

It asks for the death signal before anything else, because importing vLLM takes seconds.
"""

import importlib
import json
import os
import runpy
import sys
import tempfile
import traceback
from importlib.util import find_spec
from multiprocessing import shared_memory
from pathlib import Path

from grailnode.engine.vllm.inside.process_guard import die_with_parent

_SERVER = "vllm.entrypoints.openai.api_server"


def main() -> None:
    """Fork servers until standard input ends."""
    die_with_parent()
    _preload_threads()
    # Standard output carries the answers to the node, so vLLM's own output goes elsewhere.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's output goes to the log
    from vllm.platforms import current_platform  # noqa: PLC0415 - not before the death signal

    worker = "vllm.v1.worker.cpu_worker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker"
    for name in (_SERVER, "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor", worker):
        importlib.import_module(name)
    for line in sys.stdin:
        process = os.fork()
        if not process:
            answers.close()
            _serve(json.loads(line))
        # One server at a time: the node asks for another one when this one has ended.
        print(process, file=answers, flush=True)
        os.waitpid(process, 0)


def _preload_threads() -> None:
    """Start this program again with torch's OpenMP in front of the system's, as vLLM does for workers on a CPU."""
    torch = find_spec("torch")
    if sys.platform != "linux" or "LD_PRELOAD" in os.environ or torch is None or torch.origin is None:
        return
    package = Path(torch.origin).parent
    folders = (package.parent / "torch.libs", package / "lib")
    libraries = [str(path) for folder in folders for path in sorted(folder.glob("libgomp*.so*"))]
    os.environ["LD_PRELOAD"] = libraries[0] if libraries else ""
    os.execv(sys.executable, [sys.executable, "-m", "grailnode.engine.vllm.inside.launch"])  # noqa: S606


def _serve(flags: list[str]) -> None:
    """Be a server, in a process that was forked; does not return."""
    # A process group of its own, so that the node can kill the server with all its workers.
    os.setsid()
    die_with_parent()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Its other files lie beside its own socket, and its shared memory has the socket's name: a server that is killed
    # leaves them behind, and the node removes them.
    socket = Path(flags[flags.index("--uds") + 1])
    os.environ["TMPDIR"] = tempfile.tempdir = str(socket.parent)
    shared_memory._SHM_NAME_PREFIX = f"/{socket.name}"  # type: ignore[attr-defined]
    sys.argv = [_SERVER, *flags]
    try:
        runpy.run_module(_SERVER, run_name="__main__", alter_sys=True)
    except BaseException:  # noqa: BLE001 - the log says why a server ended, whatever it was
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Without the handlers of the launcher, from which this process was forked.
        os._exit(1)


if __name__ == "__main__":
    main()
