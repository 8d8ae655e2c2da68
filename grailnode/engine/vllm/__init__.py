"""Rollouts from vLLM, which is patched in place while it serves. Implements roles.ports.Engine.

Interface: `VllmEngine` (vllm_engine.py) is the engine of a node. It talks HTTP to a server of vLLM: a child process in
an environment of its own (`ChildServer`), or one that somebody else runs (`ExternalServer`). The server's life is in
server_supervisor.py. What runs inside of vLLM is in inside/: it draws the tokens, records the hidden states, and writes
patches into the parameters.

Invariants:
1. A token is drawn by the noise of docs/spec/sampling.md, with the same bits as by the torch engine.
2. A completion is returned only if the engine recorded, token by token, that one verified version drew all of it, and
   vLLM's answer has the same tokens. Labels, health checks and listings prove nothing.
3. Weights are verified when every tensor was read back from the engine's memory and has the digest that the trainer
   signed. A patch keeps that property: it is decoded against the engine's own memory, and digested before the commit.
4. No call waits for ever: an engine that gives no sign of life is killed with all its processes and started again.

The worst inputs: a patch for other weights, or a bent one (refused before the pause); a model whose loader does more
than copy (refused at start, by tensor); a commit that fails half-way (undone, or the weights are loaded again); a
request that vLLM preempts and computes again in other pieces (recorded once).
"""
