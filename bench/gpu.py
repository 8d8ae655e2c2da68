"""What only a GPU can settle, in about ten minutes: `python -m bench.gpu`.

Each claim is one line with pass or fail; FILE gets them all as JSON. Weights are random, in the shapes of Qwen2.5-0.5B
and 7B. PYTHON is the interpreter of vLLM's environment, by default that of `grailnode engine install`; without any, the
parts that need no vLLM run. Where there is no GPU, the same parts run on the CPU at small sizes.
"""

import argparse
import json
import os
import signal
import statistics
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import trio
from transformers import AutoConfig, AutoModelForCausalLM

from bench.engines.agreement import agreement
from bench.engines.faults import CORE, WORKER, Trial, process_of
from bench.engines.patches import patches
from bench.engines.setting import cache_flags, directory, problems_of, reported
from bench.engines.speed import speed
from grailnode.engine.hf import TransformersModel
from grailnode.engine.models import build
from grailnode.engine.policy import PACKAGED_POLICY, Policy, load_weights
from grailnode.engine.torch_engine import TorchEngine
from grailnode.engine.vllm.inside.request_records import RequestArguments, RequestRecords, Step
from grailnode.engine.vllm.inside.row_sampling import DrawnRows
from grailnode.engine.vllm.installation import InstallationError, find_python
from grailnode.engine.vllm.vllm_engine import VllmEngine
from grailnode.engine.vllm.vllm_server import ChildServer
from grailnode.engine.vllm.vllm_settings import VllmSettings
from protocol.rollout import sampling, sketch
from protocol.rollout.token_choice import choose_with_log_probabilities
from roles.ports import EngineError
from roles.trainer.learn.learner import Learner
from tests.support.builders.policies import engine_of, random_weights, requests_of_many_lengths, write_policy
from tests.support.processes.ranks import SETTINGS, run_ranks, train

MIXTURE = {
    "vocab_size": 100, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1, "tie_word_embeddings": False,
    "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """A statement, what was measured, whether it holds, and whether it is about time."""

    part: str
    statement: str
    measured: str
    holds: bool
    timed: bool = False


@dataclass(frozen=True)
class Machine:
    """Where the parts run: the device, vLLM's interpreter if there is one, and whether sizes are small."""

    device: str
    python: Path | None
    memory_share: float = 0.4

    @property
    def small(self) -> bool:
        return self.device == "cpu"

    def arguments(self, **changes: Any) -> argparse.Namespace:
        """Return arguments of `python -m bench.engines` for this machine."""
        fields: dict[str, Any] = {
            "device": self.device,
            "dtypes": ["float32" if self.small else "bfloat16"],
            "batches": [64],
        }
        fields |= {"prompts": "problems", "seed": 0, "repetitions": 2, "torch": False, "ways": ["default"]}
        fields["memory_share"] = self.memory_share
        return argparse.Namespace(**(fields | changes))


def _broken(part: str, statement: str, error: Exception) -> Claim:
    """Return the claim of a part that an error ended; all of it goes to standard error."""
    print(error, file=sys.stderr, flush=True)
    return Claim(part, statement, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}", False)


def noise(machine: Machine) -> list[Claim]:
    """Compare the compiled choice of tokens with its definition, and time it."""
    claims = []
    if not machine.small:
        fault = sampling.triton_fault(torch.device(machine.device))
        claims.append(Claim("noise", "Triton compiles the kernel", fault or "it does", not fault))
    generator = torch.Generator().manual_seed(0)
    for batch in (1, 64) if machine.small else (1, 64, 256):
        vocabulary = 32_000 if machine.small else 152_064
        logits = 4 * torch.randn(batch, vocabulary, generator=generator)
        words = sampling.seed_words([number.to_bytes(16, "little") for number in range(batch)])
        positions = torch.arange(batch)
        expected = sampling.choose(logits, words, positions, 1.0)
        scores, seeds, places = (tensor.to(machine.device) for tensor in (logits, words, positions))
        tokens = choose_with_log_probabilities(scores, seeds, places, 1.0)[0].cpu()
        begin = perf_counter()
        for _ in range(10):
            choose_with_log_probabilities(scores, seeds, places, 1.0)[0].cpu()
        milliseconds = 100 * (perf_counter() - begin)
        equal = int((tokens == expected).sum())
        statement = f"B = {batch}, V = {vocabulary:,}: draws are those of the specification"
        claims.append(Claim("noise", statement, f"{equal} of {batch}, {milliseconds:.2f} ms a step", equal == batch))
    return claims


def ranks(machine: Machine) -> list[Claim]:
    """Compare the steps of a trainer on two ranks with those of one process: by NCCL on two GPUs, by gloo on a CPU."""
    if not machine.small and torch.cuda.device_count() < 2:
        print("      ranks: not run, because NCCL needs two GPUs", flush=True)
        return []
    with directory() as place:
        policy = write_policy(place)
        model = build(policy, recompute=True)
        alone = Learner(model, random_weights(model), SETTINGS, torch.device(machine.device))
        expected = train(alone, None, 0, 4)[0][-1]
        found = run_ranks(2, policy.directory, SETTINGS, train, None, 0, 4, device=machine.device)[0][-1]
    different = sum(int((found[name] != tensor).sum()) for name, tensor in expected.items())
    elements = sum(tensor.numel() for tensor in expected.values())
    # Kernels of a GPU add in any order.
    allowed = 0 if machine.small else elements // 1000
    statement = "two ranks of a trainer take the steps of one process"
    return [Claim("ranks", statement, f"{different} of {elements} weights differ", different <= allowed)]


def records(machine: Machine) -> list[Claim]:
    """Time what a worker does on the host for each token that was drawn: record it, and hand it out."""
    batch, steps, kept = 256, 64, RequestRecords()
    microseconds, names = 0.0, list(map(str, range(batch)))
    tokens, likely = torch.zeros(batch, dtype=torch.int64), torch.zeros(batch)
    drawn = [tensor.to(machine.device) for tensor in (torch.zeros(batch, 4, dtype=torch.uint8), tokens, likely)]
    for _ in range(2):  # the first round warms up
        begin = perf_counter()
        for position in range(steps):
            kept.write(Step(0, *drawn), names, [position] * batch)
        taken = [kept.take(str(row)) for row in range(batch)]
        microseconds = 1e6 * (perf_counter() - begin) / (batch * steps)
    size = sum(item["states"].nbytes for item in taken if item is not None) / (batch * steps)
    statement = "B = 256: at most 2 microseconds of host time and 4 bytes of states a token"
    measured = f"{microseconds:.2f} microseconds, {size:g} bytes"
    step_time = _draw_milliseconds(batch, steps, machine.device)
    return [
        Claim("records", statement, measured, microseconds <= 2 and size == 4, timed=True),
        Claim(
            "records",
            "B = 256: to draw and record takes at most 1 ms of the host a step",
            f"{step_time:.2f} ms",
            step_time <= 1,
            timed=True,
        ),
    ]


def _draw_milliseconds(batch: int, steps: int, device: str) -> float:
    """Return the median time of a step's call of the sampler. With so few tokens and numbers, it is the host's own."""
    kept, logits = RequestRecords(), torch.randn(batch, 16, device=device)
    rows = DrawnRows([(row, RequestArguments(str(row), states=False)) for row in range(batch)], logits.device)
    times = []
    for position in range(steps):
        kept.sampled_states = logits
        scores, begin = logits.clone(), perf_counter()
        rows.draw(scores, np.full(batch, position), kept)
        times.append(perf_counter() - begin)
    return 1e3 * statistics.median(times)


async def processors(machine: Machine) -> list[Claim]:
    """Generate here and check on the CPU in float32: how far the two arithmetics lie apart."""
    policy, weights = Policy.load(PACKAGED_POLICY), load_weights(PACKAGED_POLICY)
    requests = problems_of(policy, 64 if machine.small else 512)
    params, seed = sampling.SamplingParams(1.0, 24, policy.stops), bytes(32)
    model = TransformersModel(policy.directory)
    here = TorchEngine(model, device=machine.device, dtype=torch.bfloat16)
    there = TorchEngine(model)
    for engine in (here, there):
        await engine.stage(0, weights)
        await engine.commit()
    generations = await here.generate(requests, params)
    forwards = await there.forward([item.prompt for item in requests], [item.tokens for item in generations])
    distances, margins = [], []
    for request, generation, forward in zip(requests, generations, forwards, strict=True):
        states = [sketch.commit("projection", hidden, seed) for hidden in (generation.hidden, forward.hidden)]
        distances.append(torch.from_numpy(sketch.distances(*states).copy()))
        tokens = torch.tensor(generation.tokens)
        margins.append(
            sampling.batch_margins(forward.logits, tokens, *sampling.token_places([request.seed], [len(tokens)]), 1.0)
        )
    missed, distance = float((torch.cat(margins) > 0).float().mean()), int(torch.cat(distances).max())
    measured = f"{missed:.2%} of tokens with a margin, largest distance {distance} of 256 units"
    return [Claim("processors", "bfloat16 here, float32 on the CPU: at most 0.6% of tokens", measured, missed <= 0.006)]


async def rollouts(machine: Machine, python: Path) -> list[Claim]:
    """Compare rollouts that end by stop tokens with those of torch, by runner and scheduling."""
    ways, count = ["not-async"] if machine.small else ["async", "not-async", "v2"], 128 if machine.small else 2048
    claims = []
    for way in ways:
        statement = f"{way}: rollouts are those of torch"
        try:
            await agreement(python, machine.arguments(sizes=["genesis"], rollouts=count, ways=[way]))
        except EngineError as error:
            claims.append(_broken("rollouts", statement, error))
            continue
        row = reported[-1]
        allowed = 0 if row["dtype"] == "float32" else 0.006
        measured = f"{row['dtype']}, {row['equal']} of {row['rollouts']} equal, "
        measured += f"{row['inexact']} of {row['tokens']} tokens with a margin"
        claims.append(Claim("rollouts", statement, measured, row["inexact"] <= allowed * row["tokens"]))
    return claims


async def throughput(machine: Machine, python: Path) -> list[Claim]:
    """Compare tokens a second with plain vLLM."""
    sizes, batch = (["32k"], 16) if machine.small else (["0.5B", "7B"], 256)
    claims = []
    for size in sizes:
        statement = f"{size}, B = {batch}: at least 0.95 of plain vLLM"
        try:
            tokens = 32 if machine.small else 64
            await speed(python, machine.arguments(sizes=[size], batch=batch, rollouts=2 * batch, tokens=tokens))
        except EngineError as error:
            claims.append(_broken("throughput", statement, error))
            continue
        row = reported[-1]
        names = ("grailnode", "greedy", "plain", "bare")  # as bench.engines speed has them
        measured = f"{row['grailnode_to_plain']}: "
        measured += ", ".join(
            f"{name} {row[name]} tokens/s ({1000 * batch / row[name]:.2f} ms a step)" for name in names
        )
        if not machine.small:
            measured += f"; GPU memory {row['grailnode_gpu_mib']:,} and {row['plain_gpu_mib']:,} MiB"
        claims.append(Claim("throughput", statement, measured, row["grailnode_to_plain"] >= 0.95, timed=True))
    return claims


async def updates(machine: Machine, python: Path) -> list[Claim]:
    """Patch 1% of the weights in place."""
    sizes, batch = (["genesis"], 16) if machine.small else (["7B"], 256)
    await patches(python, machine.arguments(sizes=sizes, shares=[0.01], batch=batch))
    row = next(row for row in reversed(reported) if row["kind"] == "patches" and "pause" in row)
    measured = ", ".join(f"{name} {row[name]:.3f} s" for name in ("stage", "drain", "commit", "pause", "read_back"))
    kept = row["rate_while_staging"] / row["rate"]
    rates = f"{row['rate_while_staging']:.0f} of {row['rate']:.0f} tokens/s"
    statement = f"{row['size']}: staged in at most 4 s, paused for at most 0.2 s"
    return [
        Claim("updates", statement, measured, row["stage"] <= 4 and row["pause"] <= 0.2, timed=True),
        Claim("updates", "at least 0.8 of the tokens a second while it stages", rates, kept >= 0.8, timed=True),
    ]


async def experts(machine: Machine, python: Path) -> list[Claim]:
    """Serve a mixture of experts with each kernel: a right one, or one that is refused by name."""
    claims = []
    for backend in [""] if machine.small else ["", "triton", "flashinfer_trtllm", "flashinfer_cutlass"]:
        flags = cache_flags(machine.device) + (("--moe-backend", backend) if backend else ())
        with directory() as place:
            config = AutoConfig.for_model("qwen3_moe", dtype="bfloat16", **MIXTURE)
            config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]  # type: ignore[attr-defined]
            config.save_pretrained(place)
            model, dtype = TransformersModel(place), machine.arguments().dtypes[0]
            settings = VllmSettings(
                python=python, device=machine.device, dtype=dtype, memory_share=machine.memory_share, flags=flags
            )
            engine = VllmEngine(
                model, ChildServer(settings, place, place / "server"), place / "engine", dtype=getattr(torch, dtype)
            )
            weights = random_weights(model)
            try:
                await engine.stage(0, weights)
                await engine.commit()
            except EngineError as error:
                measured = str(error).splitlines()[0][:160]
                claims.append(Claim("experts", f"{backend or 'default'}: right, or refused", measured, bool(backend)))
            else:
                requests, params = requests_of_many_lengths(24), sampling.SamplingParams(1.0, 6, (1,))
                expected = await (await engine_of(model, weights)).generate(requests, params)
                own = await engine.generate(requests, params)
                equal = sum(one.tokens == two.tokens for one, two in zip(expected, own, strict=True))
                least = len(own) if dtype == "float32" else len(own) * 3 // 4
                statement = f"{backend or 'default'}: right, or refused"
                claims.append(Claim("experts", statement, f"{equal} of {len(own)} rollouts equal", equal >= least))
            finally:
                await engine.close()
    return claims


async def kill(machine: Machine, python: Path) -> list[Claim]:
    """Kill the process that computes, in the middle of a call; on one GPU it is the engine core."""
    with directory() as place:
        trial = Trial(python, place, 128, 10.0, machine.device, machine.memory_share)
        try:
            await trial.begin()
            worker = process_of(trial.server, WORKER if machine.small else CORE)
            result = await trial.disturbed(partial(os.kill, worker, signal.SIGKILL), 0.2)
        finally:
            await trial.engine.close()
    seconds = result["seconds_until_repeated"]
    return [
        Claim("kill -9", "no wrong rollout", f"{result['wrong']} of {result['rollouts']}", result["wrong"] == 0),
        Claim("kill -9", "all rollouts again within 120 s", f"{seconds} s", seconds <= 120, timed=True),
    ]


async def main() -> int:
    """Run all parts; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, metavar="PYTHON")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--parts", metavar="NAME,NAME", help="only these parts")
    parser.add_argument("--memory-share", type=float, default=0.4, help="of the GPU, for each server of vLLM")
    parser.add_argument("--ignore-times", action="store_true", help="claims about time do not decide the exit code")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        python = options.python or find_python("--python")
    except InstallationError as error:
        python = None
        print(error, file=sys.stderr)
    machine, claims = Machine(device, python, options.memory_share), list[Claim]()
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU, at small sizes"
    print(f"{name}, torch {torch.__version__}", flush=True)
    parts: list[tuple[str, Callable[[], Awaitable[list[Claim]]]]] = [
        ("noise", partial(trio.to_thread.run_sync, noise, machine)),
        ("records", partial(trio.to_thread.run_sync, records, machine)),
        ("ranks", partial(trio.to_thread.run_sync, ranks, machine)),
        ("processors", partial(processors, machine)),
    ]
    if python is not None:
        of_vllm = {
            "rollouts": rollouts,
            "throughput": throughput,
            "updates": updates,
            "experts": experts,
            "kill -9": kill,
        }
        parts += [(part, partial(run, machine, python)) for part, run in of_vllm.items()]
    for part, run in parts:
        if options.parts and part not in options.parts.split(","):
            continue
        begin = perf_counter()
        try:
            found = await run()
        except Exception as error:  # noqa: BLE001 - the other parts still say something
            found = [_broken(part, "runs", error)]
        claims += found
        for claim in found:
            print(f"{'pass' if claim.holds else 'FAIL'}  {part}: {claim.statement}: {claim.measured}", flush=True)
        print(f"      {part}: {perf_counter() - begin:.0f} s", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps({"machine": name, "claims": [asdict(claim) for claim in claims]}, indent=1))
    return 0 if all(claim.holds or (claim.timed and options.ignore_times) for claim in claims) else 1


if __name__ == "__main__":
    torch.set_num_threads(8 if torch.cuda.is_available() else 1)
    sys.exit(trio.run(main))
