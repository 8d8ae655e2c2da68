"""Rollouts from vLLM, which is patched in place while it serves. Implements roles.ports.Engine.

Interface: `VllmEngine` (vllm_engine.py) is the engine of a node. It talks HTTP to a server of vLLM: a child process in
an environment of its own (`ChildServer`), or one that somebody else runs (`ExternalServer`). The server's life is in
server_supervisor.py, and its weights are in engine_weights.py. What runs inside of vLLM is in inside/: it draws the
tokens, records the hidden states, and writes patches into the parameters.

Invariants:
1. A token is drawn by the noise of docs/spec/sampling.md, with the same bits as by the torch engine.
2. A completion is returned only if the engine recorded, token by token, that one verified version drew all of it, and
   vLLM's answer has the same tokens. More may be recorded only after a complete answer, and is cut off. Labels, health
   checks and listings prove nothing.
3. Weights are verified when every tensor was read back from the engine's memory and has the digest that the trainer
   signed; a patch keeps that property, because it is decoded against the engine's own memory, its result is digested
   before the commit, and the commit is undone if any part of it fails. What cannot be undone is reloaded.
4. No call waits for ever: the engine is asked for a sign of life while requests are under way, and is killed with all
   its processes and started again if it gives none.

The worst inputs: a patch for other weights, or bent after its digest was checked (refused before the pause); a model
whose loader does more than copy (refused at start, by tensor); a worker that is stopped while /health says 200
(detected by the sign of life); a commit that fails half-way (undone, or poisoned and reloaded); an answer that spans
two versions (thrown away); a request that vLLM preempts and computes again in other pieces (recorded once).
"""
