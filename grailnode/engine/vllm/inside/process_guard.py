"""Ends a process of vLLM when the process that started it is gone, even if that was killed.

vLLM's server, engine core and workers are started by each other, and a killed server leaves the others behind. The
kernel's death signal needs no cooperation: each process asks for it when this plugin of vLLM is loaded in it, or when
it was forked from one that has the plugin.
"""

import ctypes
import os
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1
_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def guard() -> None:
    """Have this process of vLLM, and those that it forks, end with their parents (`vllm.general_plugins`)."""
    # The kernel forgets the death signal at a fork, so each child asks for it anew.
    die_with_parent()
    os.register_at_fork(after_in_child=die_with_parent)
    if os.environ.get(_METHOD) == "fork":
        _keep_forking()


def _keep_forking() -> None:
    """Let vLLM fork its engine core and workers on a CPU as well, where it would start them anew and import itself in
    each: its reason is a library for threads, which launch.py loads first.
    """
    from vllm.platforms import current_platform  # noqa: PLC0415 - vLLM is loaded by now

    platform = type(current_platform)
    update = platform.check_and_update_config

    # vLLM decides on the method when it checks its configuration, so the choice is corrected after that.
    def update_and_fork(vllm_config: Any) -> None:
        update(vllm_config)
        os.environ[_METHOD] = "fork"

    if current_platform.is_cpu():
        platform.check_and_update_config = staticmethod(update_and_fork)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. Does nothing outside of Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
