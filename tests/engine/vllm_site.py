"""Where the tests of the vLLM engine find vLLM, and the servers that they share."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from grailnode.engine.vllm.server_launcher import ServerLauncher
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ChildServer
from grailnode.engine.vllm.vllm_settings import VllmSettings
from protocol.digest import Weights
from protocol.lora import LoraSpec
from protocol.rollout import sampling
from protocol.rollout.checking import CheckRules
from protocol.rollout.sampling import SamplingParams
from roles.policy.causal_model import CausalModel
from roles.ports import EngineError
from tests.engine.engine_contract import assert_checks_agree, check_requests
from tests.support.builders.policies import NOISE, engine_of, random_weights, requests_of_many_lengths
from tests.support.vllm.plugins import add_module, schedule_ahead

SHORT_MEMORY = ("--block-size", "32", "--num-gpu-blocks-override", "10", "--max-num-batched-tokens", "24")
"""Flags of a server that preempts: it has 10 blocks for keys and values, one of which vLLM keeps for itself, and a
prompt of more than 24 tokens takes several steps.
"""

LONG = SamplingParams(temperature=20.0, max_tokens=100, stops=(1,))
"""Nearly uniform, so that some completions end soon and others fill their memory."""

ABSENT = "GRAILNODE_VLLM_PYTHON names no interpreter with vLLM; `grailnode engine install DIR` makes one"


def vllm_python() -> Path:
    """Return the interpreter of vLLM's environment, or skip the test."""
    path = Path(os.environ.get("GRAILNODE_VLLM_PYTHON", ""))
    if not path.is_file():
        pytest.skip(ABSENT)
    return path


def fitting_description(**changes: Any) -> dict[str, Any]:
    """Return what a worker of a server that fits says of itself, with changes."""
    logits = torch.arange(4096, dtype=torch.float32).remainder(7.0).expand(4, -1)
    words = sampling.seed_words([bytes(range(16))] * 4)
    return {
        "vllm": "0.31.2",
        "dtype": "bfloat16",
        "head": "float32",
        "quantization": None,
        "cache": "auto",
        "matmul": "highest",
        "processor": True,
        "speculative": False,
        "pipeline_parallel": 1,
        "data_parallel": 1,
        "device": "cpu",
        "capability": None,
        "batch_invariant": False,
        "triton_fault": "",
        "probe": sampling.choose(logits, words, torch.arange(4), 1.0).tolist(),
    } | changes


@asynccontextmanager
async def url_of(server: ChildServer) -> AsyncIterator[str]:
    """Yield a URL on the loopback interface by which a server that runs on a Unix socket is reached."""

    async def forward(source: trio.abc.ReceiveStream, target: trio.abc.HalfCloseableStream) -> None:
        async for data in source:
            await target.send_all(data)
        await target.send_eof()

    async def connect(client: trio.SocketStream) -> None:
        async with await trio.open_unix_socket(server.socket) as inner, trio.open_nursery() as nursery:
            nursery.start_soon(forward, client, inner)
            nursery.start_soon(forward, inner, client)

    async with trio.open_nursery() as nursery:
        listeners: list[trio.SocketListener] = await nursery.start(
            lambda task_status: trio.serve_tcp(connect, 0, host="127.0.0.1", task_status=task_status)
        )
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


class SharedServer(ChildServer):
    """A server that many engines use one after the other: an engine that is closed leaves it running."""

    async def stop(self) -> None:
        """Do nothing; `end` ends it."""

    def close(self) -> None:
        """Do nothing; `end` ends it."""

    def end(self) -> None:
        super().close()


class BendableServer(SharedServer):
    """A shared server whose weights a test can damage, and which tells how it works.

    Args:
        ahead: whether it schedules as on a GPU.
    """

    def __init__(
        self, settings: VllmSettings, model: Path, directory: Path, ahead: bool = False, lora: LoraSpec | None = None
    ) -> None:
        super().__init__(settings, model, directory, lora)
        self.ahead = ahead

    def environment(self) -> dict[str, str]:
        environment = super().environment()
        add_module(environment, self.log.parent, "bendable_extension")
        if self.ahead:
            schedule_ahead(environment, self.log.parent)
        return environment

    def exchange_layouts(self) -> None:
        """Have servers that start from now on read the weights of experts and of adapters in another order."""
        site = self.log.parent / "site"
        site.mkdir(parents=True, exist_ok=True)
        (site / "exchanged").touch()

    def flags(self, socket: str) -> list[str]:
        """Return the flags; the last one of a name counts."""
        flags = [flag for flag in super().flags(socket) if flag != "--disable-log-stats"]
        return [*flags, "--worker-extension-cls", "bendable_extension.BendableExtension"]

    async def bend(self, *names: str) -> None:
        assert await self._call("bend", *names) == {"bent": len(names)}

    async def records(self) -> int:
        """Return how many records the worker keeps, after checking that it schedules as it should."""
        state = await self._call("scheduling")
        assert state["ahead"] == self.ahead
        return int(state["records"])

    async def preemptions(self) -> int:
        """Return how often vLLM has preempted a request since it was started."""
        async with self.client(60.0, 1) as client:
            lines = (await client.get("/metrics")).text.splitlines()
        (line,) = (line for line in lines if line.startswith("vllm:num_preemptions_total"))
        return int(float(line.rpartition(" ")[2]))

    async def _call(self, method: str, *arguments: str) -> dict[str, Any]:
        async with self.client(60.0, 1) as client:
            answer = await client.post("/collective_rpc", json={"method": method, "args": arguments})
            (result,) = answer.json()["results"]
            return dict(result)


class ForkedServer(ChildServer):
    """A server of a launcher that several servers have, one after the other, so that vLLM is imported once for all.

    Args:
        launcher: its environment variables are those of the server, and its log has the server's output.
    """

    def __init__(self, settings: VllmSettings, model: Path, directory: Path, launcher: ServerLauncher) -> None:
        super().__init__(settings, model, directory)
        self._launcher = launcher

    def close(self) -> None:
        """End the server; the launcher stays."""
        self._launcher.kill_server()


def new_launcher(directory: Path) -> ServerLauncher:
    """Return a launcher of servers on a CPU; it starts with its first server."""
    return ServerLauncher(ChildServer(VllmSettings(python=vllm_python()), directory, directory)._spawn)


def shared_server(
    model: Path, directory: Path, *, ahead: bool = False, lora: LoraSpec | None = None, **changes: Any
) -> BendableServer:
    """Return a server for a policy directory; it starts with its first engine."""
    values = {"python": vllm_python(), "sequences": 64, **changes}
    return BendableServer(VllmSettings.model_validate(values), model, directory, ahead, lora)


async def check_refusal(engine: VllmEngine, weights: Weights, reason: str) -> None:
    """Check that an engine refuses weights for a reason, and close it."""
    try:
        with pytest.raises(EngineError, match=reason):
            await engine.stage(0, weights)
    finally:
        await engine.close()


def refuse_restarts(event: str, **fields: Any) -> None:
    """Fail where an engine reports that it was restarted: the second attempt would hide a fault."""
    assert event != "engine-restarted", fields


async def check_preempted(engine: VllmEngine, server: BendableServer, model: CausalModel, count: int) -> None:
    """Check that completions and checks are those of torch, although a server with SHORT_MEMORY preempts some of them
    and computes them again; the engine serves `random_weights(model)`.
    """
    requests = requests_of_many_lengths(count)
    reference = await engine_of(model, random_weights(model))
    expected = await reference.generate(requests, LONG)
    completions = [generation.tokens for generation in expected]
    rules, items = CheckRules(LONG), check_requests(requests, completions)
    checks = await reference.check(items, rules)

    async def generate(place: int) -> None:
        (generation,) = await engine.generate([requests[place]], LONG)
        assert generation.tokens == completions[place]
        torch.testing.assert_close(generation.hidden, expected[place].hidden, rtol=0, atol=NOISE)
        torch.testing.assert_close(generation.logprobs, expected[place].logprobs, rtol=0, atol=NOISE)

    async def check(place: int) -> None:
        assert_checks_agree(await engine.check([items[place]], rules), [checks[place]])

    before = await server.preemptions()
    # A server that gets its requests slowly, on a busy machine, may need another round.
    for _ in range(5):
        # Each call alone and in any order, so that checks lie among the completions.
        async with trio.open_nursery() as nursery:
            for place in range(count):
                nursery.start_soon(generate, place)
                nursery.start_soon(check, place)
        assert await server.records() == 0
        if await server.preemptions() > before:
            return
    pytest.fail("vLLM preempted nothing")
