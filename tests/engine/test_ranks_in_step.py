"""Two ranks of tensor parallelism stage versions together, here as threads: what ends the staging on one rank ends it
on the other at the same tensor, and neither waits for ever. tests/engine/test_vllm_families.py has ranks of processes.
"""

import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from grailnode.engine.vllm.inside.element_changes import ElementChange
from grailnode.engine.vllm.inside.rank_steps import Job
from grailnode.engine.vllm.inside.served_weights import Gather, ServedWeights, ServedWeightsError, StagedVersion
from grailnode.engine.vllm.inside.staging import stage_patch, stage_weights
from grailnode.engine.vllm.inside.tensor_map import map_tensors
from protocol.digest import digest_weights
from protocol.patch import encode

RANKS = 2
CANCELLATIONS = 40
"""Of a patch; there are half as many of a checkpoint."""

PATIENCE_SECONDS = 300.0  # a busy machine may be many times slower than an idle one
"""Far more than the ranks need; ranks that wait for each other never end."""

SHAPES = {f"layers.{number:02}.weight": (64, 96) for number in range(8)}

Outcomes = dict[str, tuple[list[str], list[str]]]


class ColumnModel(torch.nn.Module):
    """A model of which each rank has some columns of every tensor."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self.layers = torch.nn.ParameterDict(
            {
                name.replace(".", "_"): torch.nn.Parameter(torch.zeros(rows, columns // RANKS), requires_grad=False)
                for name, (rows, columns) in SHAPES.items()
            }
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            own = self.layers[name.replace(".", "_")]
            own.data.copy_(tensor.narrow(1, self._rank * own.shape[1], own.shape[1]))


def weights_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in SHAPES.items()}


def sparse_target(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with a few changed elements in every tensor."""
    target = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in target.values():
        tensor[::7, ::5] += 1.0
    return target


WEIGHTS = weights_of(0)
TARGET = sparse_target(WEIGHTS)
DENSE = weights_of(1)
PATCH = encode(WEIGHTS, TARGET)
CANCELLED = "CancelledError: "


def begin_patch(served: ServedWeights, patch: bytes = PATCH) -> Job:
    return Job(lambda cancelled: {"staged": stage_patch(served, 1, patch, digest_weights(TARGET), cancelled)})


def begin_weights(served: ServedWeights, version: int, path: Path, weights: dict[str, Tensor]) -> Job:
    digest = digest_weights(weights)
    return Job(lambda cancelled: {"staged": stage_weights(served, version, path, digest, cancelled)})


def staged_by(job: Job) -> StagedVersion:
    """Wait until a job is over; return what it staged, or raise what it raised."""
    while (state := job.state()).get("running"):
        time.sleep(0.001)
    staged: StagedVersion = state["staged"]
    return staged


def end_of(job: Job) -> str:
    """Wait until a job is over, and return what it staged or what it raised."""
    try:
        return f"version {staged_by(job).version}"
    except Exception as error:  # noqa: BLE001 - whatever it is, a rank returns it as an answer
        return f"{type(error).__name__}: {error}"


def cancel_often(rank: int, begin: Callable[[], Job], count: int) -> list[str]:
    """Begin a job many times, and stop each at a moment that this rank chooses alone; return how they ended."""
    staged_by(begin())  # whatever is compiled or imported at first
    start = time.perf_counter()
    staged_by(begin())
    seconds = time.perf_counter() - start
    moments, outcomes = random.Random(rank), []
    for _ in range(count):
        job = begin()
        time.sleep(moments.uniform(0.0, 1.6 * seconds))
        job.stop()
        outcomes.append(end_of(job))
    return outcomes


def cancel_and_fail(
    served: ServedWeights, model: ColumnModel, rank: int, directory: Path, count: int
) -> dict[str, list[str]]:
    """Cancel jobs of every kind, and let some fail on rank 1 alone; the last ones succeed."""
    served.commit(staged_by(begin_weights(served, 0, directory / "weights", WEIGHTS)))
    served.verify(0, digest_weights(WEIGHTS))
    outcomes = {"patch": cancel_often(rank, lambda: begin_patch(served), count)}
    for name, weights in (("sparse", TARGET), ("dense", DENSE)):
        begin = partial(begin_weights, served, 1, directory / name, weights)
        outcomes[name] = cancel_often(rank, begin, count // 2)

    other = encode(WEIGHTS, DENSE) if rank else PATCH
    outcomes["another patch"] = [end_of(begin_patch(served, other))]
    bent = bytearray(PATCH)
    bent[-1] ^= rank  # in the last tensor
    outcomes["bent patch"] = [end_of(begin_patch(served, bytes(bent)))]
    missing = directory / ("nowhere" if rank else "sparse")
    outcomes["missing file"] = [end_of(begin_weights(served, 1, missing, TARGET))]
    words = model.layers["layers_03_weight"].view(torch.int32)
    words[0, 0] ^= rank
    outcomes["damaged weights"] = [end_of(begin_patch(served))]
    outcomes["verification"] = [error_of(partial(served.verify, 0, digest_weights(WEIGHTS)))]
    words[0, 0] ^= rank
    served.verify(0, digest_weights(WEIGHTS))

    staged = staged_by(begin_patch(served))
    outcomes["commit that is not staged"] = [error_of(partial(served.commit, None if rank else staged))]
    served.verify(0, digest_weights(WEIGHTS))
    outcomes["commit"] = [error_of(partial(served.commit, spoiled(staged_by(begin_patch(served)), rank)))]
    served.verify(0, digest_weights(WEIGHTS))
    served.commit(staged_by(begin_patch(served)))
    served.verify(1, digest_weights(TARGET))
    dense = staged_by(begin_weights(served, 2, directory / "dense", DENSE))
    outcomes["commit of whole tensors"] = [error_of(partial(served.commit, spoiled(dense, rank)))]
    assert served.version is None
    return outcomes


class FailingChange(ElementChange):
    """A change that fails when it is swapped in."""

    def swap(self) -> None:
        raise RuntimeError("out of memory")


def spoiled(staged: StagedVersion, rank: int) -> StagedVersion:
    """Return a version of which a change cannot be written on rank 1."""
    if rank:
        empty = torch.empty(0, dtype=torch.int32)
        staged.changes.append(FailingChange(empty, empty, empty))
    return staged


def error_of(work: Callable[[], None]) -> str:
    """Return what some work raises; empty if nothing."""
    try:
        work()
    except ServedWeightsError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def answer_of_rank(rank: int, directory: Path, gather: Gather) -> dict[str, list[str]]:
    model = ColumnModel(rank)
    served = ServedWeights(map_tensors(model, SHAPES, whole=False), gather)
    return cancel_and_fail(served, model, rank, directory, CANCELLATIONS)


def answers_of_threads(directory: Path) -> list[dict[str, list[str]]]:
    """Return how the jobs ended on each rank; the ranks are threads of this process."""
    barrier = threading.Barrier(RANKS, timeout=PATIENCE_SECONDS)
    parts: dict[int, Tensor] = {}

    def gather_of(rank: int) -> Gather:
        def gather(bits: Tensor) -> None:
            parts[rank] = bits.view(torch.uint8).clone()
            barrier.wait()
            bits.view(torch.uint8).copy_(torch.maximum(parts[0], parts[1]))
            barrier.wait()

        return gather

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(lambda rank: answer_of_rank(rank, directory, gather_of(rank)), range(RANKS)))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Return how the jobs of each kind ended on both ranks."""
    directory = tmp_path_factory.mktemp("ranks")
    for name, weights in (("weights", WEIGHTS), ("sparse", TARGET), ("dense", DENSE)):
        save_file(weights, directory / name)
    first, second = answers_of_threads(directory)
    return {kind: (first[kind], second[kind]) for kind in first}


@pytest.mark.parametrize("kind", ["patch", "sparse", "dense"])
def test_cancellations_at_any_moment_end_both_ranks_alike(outcomes: Outcomes, kind: str) -> None:
    first, second = outcomes[kind]
    assert first == second
    assert CANCELLED in first  # how many are depends on how busy the machine is
    assert set(first) <= {"version 1", CANCELLED}


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("another patch", "PatchError: "),
        ("bent patch", "PatchError: "),
        ("missing file", "FileNotFoundError: "),
        ("damaged weights", "ServedWeightsError: layers.03.weight: an element that is served is no BF16 number"),
        ("commit that is not staged", "ServedWeightsError: the version is not staged"),
        ("commit", "ServedWeightsError: version 1 was not committed, and undone: out of memory"),
    ],
)
def test_what_fails_on_one_rank_ends_both(outcomes: Outcomes, kind: str, line: str) -> None:
    first, second = outcomes[kind]
    assert second[0].startswith(line)
    assert first == ["ServedWeightsError: another rank of this server failed, and its error says why"]


def test_damage_on_one_rank_is_found_by_the_verification_of_both(outcomes: Outcomes) -> None:
    """A rank that went on with other tensors, such as the adapters of a damaged base, would wait for ever."""
    for (answer,) in outcomes["verification"]:
        assert answer.startswith("DifferentWeightsError: ")
        assert answer.endswith("differ from version 0 in 1 tensors: layers.03.weight")


def test_whole_tensors_that_one_rank_could_not_write_poison_those_that_wrote_them(outcomes: Outcomes) -> None:
    for (answer,) in outcomes["commit of whole tensors"]:
        assert answer.startswith("PoisonedError: the weights are damaged by a commit that failed")
