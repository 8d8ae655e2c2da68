"""Measure the vLLM engine beside plain vLLM and the torch engine: `python -m bench.engines KIND --python PYTHON`.

    speed       tokens a second, beside the same vLLM without us that samples by itself and returns log-probabilities
    patches     seconds to stage, pause, commit and read back, by size and number of changed elements
    agreement   rollouts and their margins against the torch engine, in float32 and bfloat16
    faults      seconds from a fault to the repeated rollouts, and rollouts that were wrong

PYTHON is the interpreter of vLLM's environment (`grailnode engine install DIR`). Each line of output is a JSON object.
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio

from grailnode.engine.causal_model import build
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.engine.torch_engine import TorchEngine
from grailnode.engine.vllm.vllm_client import VllmClient
from grailnode.engine.vllm.vllm_engine import EngineLimits, VllmEngine
from grailnode.engine.vllm.vllm_server import ChildServer, ServerSettings
from protocol import environments
from protocol.chain.manifest import Manifest
from protocol.digest import digest_weights
from protocol.patch import encode
from protocol.rollout.sampling import SamplingParams, batch_margins, log_probabilities
from roles.ports import Request
from tests.support.builders.policies import random_weights, write_policy

SIZES: dict[str, dict[str, int]] = {
    "32k": {"vocab_size": 32_000, "hidden_size": 128, "head_dim": 32},
    "152k": {"vocab_size": 151_936, "hidden_size": 128, "head_dim": 32},
    "68M": {
        "vocab_size": 32_000,
        "hidden_size": 768,
        "head_dim": 64,
        "intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
}


class PlainServer(ChildServer):
    """The same vLLM without our processor, extension and plugin."""

    def command(self) -> list[str]:
        """Return the command line without what is ours."""
        words = super().command()
        for flag in ("--logits-processors", "--worker-extension-cls"):
            place = words.index(flag)
            del words[place : place + 2]
        return words

    def environment(self) -> dict[str, str]:
        """Return the environment without our plugin."""
        return super().environment() | {"VLLM_PLUGINS": "none"}


def report(**fields: Any) -> None:
    """Print one result."""
    print(json.dumps(fields), flush=True)


def requests_of(count: int, vocabulary: int, length: int = 32) -> list[Request]:
    """Return requests with random prompts."""
    generator = random.Random(0)
    return [
        Request(tuple(generator.randrange(2, vocabulary) for _ in range(length)), generator.randbytes(16))
        for _ in range(count)
    ]


@contextmanager
def directory() -> Iterator[Path]:
    """Yield a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="grailnode-bench-") as path:
        yield Path(path)


async def timed(work: Callable[[], Awaitable[Any]]) -> float:
    """Return the seconds that some work takes."""
    start = time.perf_counter()
    await work()
    return time.perf_counter() - start


async def speed(python: Path, arguments: argparse.Namespace) -> None:
    """Compare tokens a second; no token ends a completion, so all engines compute the same number."""
    for size in arguments.sizes:
        with directory() as place:
            policy = write_policy(place / "policy", eos_token_id=1, max_position_embeddings=512, **SIZES[size])
            model = build(policy)
            weights = random_weights(model)
            params = SamplingParams(1.0, arguments.tokens, (model.vocabulary - 1,))
            requests = requests_of(arguments.rollouts, model.vocabulary)
            settings = ServerSettings(python, policy.directory, place / "server", sequences=arguments.batch)
            engine = VllmEngine(model, ChildServer(settings), place / "engine")
            await engine.stage(0, weights)
            await engine.commit()
            plain = PlainServer(ServerSettings(python, policy.directory, place / "plain", sequences=arguments.batch))
            await plain.start()
            reference = TorchEngine(model)
            await reference.stage(0, weights)
            await reference.commit()
            async with VllmClient(plain) as client:
                runs: dict[str, Callable[[], Awaitable[Any]]] = {
                    "grailnode": partial(engine.generate, requests, params),
                    "plain": partial(plain_completions, client, requests, params),
                }
                if arguments.torch:
                    runs["torch"] = partial(reference.generate, requests, params)
                tokens: dict[str, list[float]] = {name: [] for name in runs}
                for repetition in range(arguments.repetitions + 1):
                    for name, run in runs.items():
                        seconds = await timed(run)
                        if repetition:  # the first one warms up
                            tokens[name].append(len(requests) * arguments.tokens / seconds)
            best = {name: max(values) for name, values in tokens.items()}
            ratio = best["grailnode"] / best["plain"]
            report(
                kind="speed",
                size=size,
                batch=arguments.batch,
                **{k: round(v) for k, v in best.items()},
                ratio=round(ratio, 3),
            )
            await engine.close()
            await plain.stop()


async def plain_completions(client: VllmClient, requests: Sequence[Request], params: SamplingParams) -> None:
    """Generate with vLLM's own sampling and log-probabilities."""

    async def one(request: Request) -> None:
        sampling = {"temperature": 1.0, "max_tokens": params.max_tokens, "ignore_eos": True, "logprobs": 0}
        await client.generate({"token_ids": list(request.prompt), "sampling_params": {**sampling, "detokenize": False}})

    async with trio.open_nursery() as nursery:
        for request in requests:
            nursery.start_soon(one, request)


def with_changes(weights: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """Return weights of which a share of the elements is one unit in the last place larger or smaller."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(
            torch.rand(tensor.shape, generator=generator) < share,
            tensor.view(torch.int16) ^ 1,
            tensor.view(torch.int16),
        ).view(torch.bfloat16)
        for name, tensor in weights.items()
    }


async def patches(python: Path, arguments: argparse.Namespace) -> None:
    """Measure each part of an update, while requests are under way."""
    for size in arguments.sizes:
        with directory() as place:
            policy = (
                Policy.load(PACKAGED_POLICY)
                if size == "genesis"
                else write_policy(place / "policy", max_position_embeddings=512, **SIZES[size])
            )
            model = build(policy)
            weights = load_weights(PACKAGED_POLICY) if size == "genesis" else random_weights(model)
            engine = VllmEngine(
                model, ChildServer(ServerSettings(python, policy.directory, place / "server")), place / "engine"
            )
            await engine.stage(0, weights)
            await engine.commit()
            client = await engine._connected()
            for version, share in enumerate(arguments.shares, 1):
                target = with_changes(weights, share, version)
                patch = encode(weights, target)
                manifest = Manifest.model_construct(version=version, weights=digest_weights(target))
                stage = await timed(partial(engine.stage_patch, version, patch, manifest))
                start = time.perf_counter()
                await client.post("/pause", mode="wait")
                (result,) = await client.call("commit", version=version)
                await client.post("/reset_prefix_cache")
                await client.post("/resume")
                pause = time.perf_counter() - start
                engine._checkpoints.commit()
                engine._version, engine._staged = version, None
                verify = await timed(engine.verify)
                changed = sum(int((weights[n].view(torch.int16) != target[n].view(torch.int16)).sum()) for n in weights)
                report(
                    kind="patches",
                    size=size,
                    elements=sum(tensor.numel() for tensor in weights.values()),
                    changed=changed,
                    patch_bytes=len(patch),
                    stage_seconds=round(stage, 4),
                    commit_seconds=round(result["seconds"], 4),
                    pause_seconds=round(pause, 4),
                    verify_seconds=round(verify, 4),
                )
                weights = target
            await engine.close()


def problems_of(policy: Policy, count: int) -> list[Request]:
    """Return requests with the prompts that the packaged policy has learned."""
    environment = environments.get("addition")
    seeds = [number.to_bytes(32, "little") for number in range(count)]
    return [Request(policy.tokenizer.encode(environment.problem(seed).prompt), seed[:16]) for seed in seeds]


async def agreement(python: Path, arguments: argparse.Namespace) -> None:
    """Compare rollouts of the packaged policy with the torch engine, and check them by its prefill."""
    policy, weights = Policy.load(PACKAGED_POLICY), load_weights(PACKAGED_POLICY)
    model = build(policy)
    params = SamplingParams(1.0, 24, policy.stops)
    known = arguments.prompts == "problems"
    count = arguments.rollouts
    requests = problems_of(policy, count) if known else requests_of(count, model.vocabulary, 8)
    for dtype in arguments.dtypes:
        reference = TorchEngine(model, dtype=getattr(torch, dtype))
        await reference.stage(0, weights)
        await reference.commit()
        expected = await reference.generate(requests, params)
        with directory() as place:
            flags = tuple(arguments.flags.split())
            settings = ServerSettings(
                python, policy.directory, place / "server", dtype=dtype, sequences=arguments.batch, flags=flags
            )
            engine = VllmEngine(model, ChildServer(settings), place / "engine", dtype=getattr(torch, dtype))
            await engine.stage(0, weights)
            await engine.commit()
            found = await engine.generate(requests, params)
            equal = sum(a.tokens == b.tokens for a, b in zip(expected, found, strict=True))
            checked = await reference.forward([r.prompt for r in requests], [g.tokens for g in found])
            margins, likely = [], []
            for request, generation, forward in zip(requests, found, checked, strict=True):
                tokens = torch.tensor(generation.tokens)
                margins.append(batch_margins(forward.logits, tokens, [request.seed], [len(tokens)], params.temperature))
                likely.append(
                    (torch.tensor(generation.logprobs) - log_probabilities(forward.logits, tokens, 1.0)).abs()
                )
            every = torch.cat(margins)
            report(
                kind="agreement",
                dtype=dtype,
                prompts=arguments.prompts,
                flags=arguments.flags,
                batch=arguments.batch,
                rollouts=len(found),
                equal=equal,
                tokens=len(every),
                inexact=int((every > 0).sum()),
                largest_margin=round(float(every.max()), 6),
                largest_log_probability_difference=round(float(torch.cat(likely).max()), 6),
            )
            await engine.close()


async def faults(python: Path, arguments: argparse.Namespace) -> None:
    """Kill or stop each process while rollouts are under way, and compare the rollouts that come in the end."""
    policy, weights = Policy.load(PACKAGED_POLICY), load_weights(PACKAGED_POLICY)
    model = build(policy)
    params = SamplingParams(1.0, 24, policy.stops)
    requests = requests_of(arguments.rollouts, model.vocabulary, 8)
    reference = TorchEngine(model)
    await reference.stage(0, weights)
    await reference.commit()
    expected = [g.tokens for g in await reference.generate(requests, params)]
    with directory() as place:
        events: list[dict[str, Any]] = []
        server = ChildServer(ServerSettings(python, policy.directory, place / "server"))
        engine = VllmEngine(
            model,
            server,
            place / "engine",
            limits=EngineLimits(hang=5.0),
            report=lambda event, **fields: events.append({"event": event, **fields}),
        )
        await engine.stage(0, weights)
        await engine.commit()
        for name, fault in (("SIGKILL", signal.SIGKILL), ("SIGSTOP", signal.SIGSTOP)):
            for process in ("VLLM::Worker", "VLLM::EngineCor", "python"):
                found: list[tuple[int, ...]] = []

                async def generate(found: list[tuple[int, ...]] = found) -> None:
                    found.extend(g.tokens for g in await engine.generate(requests, params))

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(generate)
                    await trio.sleep(0.5)
                    moment = time.perf_counter()
                    os.kill(process_of(server, process), fault)
                wrong = sum(a != b for a, b in zip(expected, found, strict=True))
                ready = [event["seconds"] for event in events if event["event"] == "engine-ready"]
                report(
                    kind="faults",
                    fault=name,
                    process=process,
                    wrong=wrong,
                    rollouts=len(found),
                    seconds_until_repeated=round(time.perf_counter() - moment, 1),
                    restart_seconds=ready[-1] if ready else None,
                )
        await engine.close()


def process_of(server: ChildServer, name: str) -> int:
    """Return the id of a process of a server's group by the beginning of its name."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "comm").read_text().strip()
            except OSError:
                continue
            if int(fields[2]) == server.process_id and command.startswith(name):
                return int(entry.name)
    raise LookupError(name)


KINDS = {"speed": speed, "patches": patches, "agreement": agreement, "faults": faults}


def main() -> None:
    """Run the measurements that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument(
        "--sizes", nargs="+", default=["32k", "152k"], help="of policies: 32k, 152k, 68M; genesis for patches"
    )
    parser.add_argument("--shares", nargs="+", type=float, default=[0.001, 0.01, 0.1], help="of changed elements")
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="of each rollout")
    parser.add_argument("--batch", type=int, default=64, help="sequences that vLLM computes at the same time")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--prompts", choices=["random", "problems"], default="random", help="random tokens, or sums")
    parser.add_argument("--flags", default="", help="further flags of vLLM")
    parser.add_argument("--torch", action="store_true", help="measure the torch engine as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    trio.run(KINDS[arguments.kind], arguments.python, arguments)


if __name__ == "__main__":
    main()
