"""Verified groups, steps on them by one rank and by several, to be compared, and ranks as processes of a test, of which
rank 0 runs a scenario and the others follow it.
"""

import hashlib
import io
import multiprocessing
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import trio
from torch import Tensor

from grailnode.engine.lora_model import LoraModel
from grailnode.engine.models import build
from grailnode.engine.policy import Policy, load_weights
from grailnode.node.process_launch import Seat, prepare_rank
from grailnode.node.rank_processes import Meeting
from grailnode.ranks.sharded_learner import ShardedLearner
from grailnode.store.local import LocalStore
from protocol.lora import LoraSpec
from protocol.quantization import Precision
from roles.policy.causal_model import CausalModel
from roles.trainer.learn.checkpoint_files import checkpoint_folder
from roles.trainer.learn.learner import Learner, LearnerSettings
from roles.trainer.learn.state_rows import SavedRows
from roles.trainer.learn.training_settings import OptimizerSettings
from roles.trainer.tensor_shards import TensorSource
from roles.trainer.verified_batch import VerifiedGroup
from tests.support.builders.policies import random_weights
from tests.support.builders.verified_batches import make_group
from tests.support.processes.programs import PATIENCE

SETTINGS = LearnerSettings(
    max_batch_tokens=20, optimizer=OptimizerSettings(learning_rate=1e-3, max_grad_norm=0.5, warmup_steps=0)
)
"""With these a step of 4 rollouts has two passes, and gradients are clipped."""

Tensors = Mapping[str, Tensor]


def group(
    name: object,
    version: int = 0,
    *,
    prompt: tuple[int, ...] = (5, 6, 7),
    completions: Sequence[tuple[int, ...]] = ((3, 1), (4, 1)),
    rewards: Sequence[float] = (1.0, 0.0),
) -> VerifiedGroup:
    """Return a group whose digest is that of its name."""
    logprobs = [torch.full((len(tokens),), -1.0 - index) for index, tokens in enumerate(completions)]
    return make_group(hashlib.sha256(str(name).encode()).digest(), version, prompt, completions, logprobs, rewards)


def groups_of(step: int) -> list[VerifiedGroup]:
    first = group(f"a{step}", completions=((3, 4, 1), (4, 9, 1)), rewards=(1.0, 0.0))
    second = group(f"b{step}", completions=((7, 7, 5, 8, 1), (12, 13, 4, 1)), rewards=(0.0, 1.0))
    return [first, second]


def read(source: TensorSource) -> dict[str, Tensor]:
    """Return copies of all tensors of a source."""
    return {name: source.read([name])[name].clone() for name in sorted(source.sizes)}


def train(learner: Learner, state: Tensors | None, first: int, last: int) -> tuple[list[Tensors], Tensors]:
    """Take steps from a state, or from the start; return the view after each, and the last state."""
    if state is not None:
        learner.restore(state)
    views: list[Tensors] = []
    for step in range(first, last):
        learner.update(learner.gradients(groups_of(step)))
        views.append(read(learner.view_source()))
    return views, learner.state()


def go_on(learner: Learner, directory: Path, saved: SavedRows | None, last: int) -> tuple[list[Tensors], SavedRows]:
    """Take steps from what is saved in the state of a host, or from the start; return the views and save again."""
    state, folder = LocalStore(directory), checkpoint_folder(last, 0)
    if saved is not None:
        trio.run(learner.load, state, saved, trio.to_thread.run_sync)
    views, _ = train(learner, None, learner.steps, last)
    previous = "" if saved is None else saved.folder
    parts, _ = trio.run(learner.save, state, trio.to_thread.run_sync, 4096, folder, previous)
    return views, SavedRows(folder, tuple(parts), last)


def assert_equal(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []


def assert_same_run(one: tuple[list[Tensors], Tensors], other: tuple[list[Tensors], Tensors]) -> None:
    """Compare what `train` returned: all views, and the last state."""
    for view, other_view in zip(one[0], other[0], strict=True):
        assert_equal(view, other_view)
    assert_equal(one[1], other[1])


# Ranks as processes


Scenario = Callable[..., Any]
"""What rank 0 does with its learner and some arguments; a module-level function."""

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([__name__, "grailnode.node.processes", "torch._dynamo"])  # or each process imports them


class Ranks:
    """The ranks of a learner, until the end of a context.

    Args:
        policy: the directory of the policy, which begins with random weights.
        states: of one of several hosts each, among which the ranks are divided.
        options: `dtype`; `lora`, the adapters that they train instead, on the policy as it is; `precision` in which
            they publish; `device` on which they compute, of "cuda" each a GPU of its own.
    """

    def __init__(
        self,
        count: int,
        policy: Path,
        settings: LearnerSettings,
        scenario: Scenario,
        *rest: Any,
        states: Sequence[Path] = (),
        **options: Any,
    ) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._answers, answers = context.Pipe(duplex=False)
        self.processes = []
        for rank in range(count):
            seat = Seat(rank, count, f"file://{self._directory.name}/meeting", count)
            host = rank * len(states) // count
            state = states[host] if states else Path(self._directory.name)
            sweeps = host > (rank - 1) * len(states) // count  # the first rank of its host
            local_ranks = count // len(states) if states else None
            arguments = (seat, policy, settings, state, sweeps, local_ranks, answers, scenario, pickle.dumps(rest))
            self.processes.append(context.Process(target=_take_seat, args=arguments, kwargs=options, daemon=True))
            self.processes[-1].start()
        answers.close()

    def answer(self) -> Any:
        """Return what the scenario returned, or raise EOFError if rank 0 has ended without it."""
        return torch.load(io.BytesIO(self._answers.recv_bytes()), weights_only=False)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.join(PATIENCE)  # the others end when rank 0 has ended
        assert not any(process.is_alive() for process in self.processes)
        self._directory.cleanup()


def run_ranks(*arguments: Any, **options: Any) -> Any:
    """Return what a scenario returned on rank 0; the arguments are those of `Ranks`."""
    with Ranks(*arguments, **options) as ranks:
        return ranks.answer()


def _take_seat(
    seat: Seat,
    directory: Path,
    settings: LearnerSettings,
    state: Path,
    sweeps: bool,
    local_ranks: int | None,
    answers: "Connection[Any, Any]",
    scenario: Scenario,
    rest: bytes,
    *,
    dtype: torch.dtype = torch.float32,
    lora: LoraSpec | None = None,
    precision: Precision = "bf16",
    device: str = "cpu",
) -> None:
    torch.set_num_threads(1)
    prepare_rank(seat)
    model: CausalModel = build(Policy.load(directory), recompute=True, lora=lora)
    if lora is not None:
        model = LoraModel(model, load_weights(directory), dtype=dtype)
    weights = random_weights(model) if seat.rank == 0 else None
    learner = ShardedLearner(model, weights, settings, Meeting(seat).join(device, {}), dtype, precision, local_ranks)
    if seat.rank == 0:
        result = scenario(learner, *pickle.loads(rest))
        answer = io.BytesIO()
        torch.save(result, answer)  # multiprocessing would send descriptors that end with this process
        answers.send_bytes(answer.getvalue())
        return
    answers.close()
    trio.run(partial(learner.follow, LocalStore(state), sweeps=sweeps))
