"""Starts vLLM's server: `python -m grailnode.engine.vllm.inside.launch FLAGS`.

It asks for the death signal before anything else, because importing vLLM takes seconds.
"""

import runpy

from grailnode.engine.vllm.inside.process_guard import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
