"""Ends a process of vLLM when the process that started it is gone, even if that was killed.

vLLM's server, engine core and workers are started by each other, and a killed server leaves the others behind. The
kernel's death signal needs no cooperation: each process asks for it when this plugin of vLLM is loaded in it.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Prepare a process of vLLM (an entry point of `vllm.general_plugins`): death signal and plain weights."""
    from grailnode.engine.vllm.inside.plain_weights import keep_plain_weights  # noqa: PLC0415 - vLLM is loaded by now

    die_with_parent()
    os.register_at_fork(after_in_child=die_with_parent)
    keep_plain_weights()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. Does nothing outside of Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
