"""Ranks of a trainer as processes of a test: rank 0 runs a scenario, the others follow it."""

import multiprocessing
import pickle
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from grailnode.engine.lora_model import LoraModel
from grailnode.engine.models import build
from grailnode.engine.policy import Policy, load_weights
from grailnode.node.process_launch import Seat, prepare_rank
from grailnode.node.rank_processes import join_ranks
from protocol.lora import LoraSpec
from roles.policy.causal_model import CausalModel
from roles.trainer.learn.learner import LearnerSettings
from roles.trainer.learn.sharded.rank_learner import RankLearner
from roles.trainer.learn.sharded.sharded_learner import ShardedLearner, follow_reads, follow_steps
from tests.support.builders.policies import random_weights
from tests.support.processes.programs import PATIENCE

Scenario = Callable[..., Any]
"""What rank 0 does with its learner and some arguments; a module-level function."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


class Ranks:
    """The ranks of a learner, until the end of a context.

    Args:
        policy: the directory of the policy, which begins with random weights.
        lora: the adapters that they train instead, on the policy as it is; None for all weights.
    """

    def __init__(
        self,
        count: int,
        policy: Path,
        settings: LearnerSettings,
        dtype: torch.dtype,
        scenario: Scenario,
        *rest: Any,
        lora: LoraSpec | None = None,
    ) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._answers, answers = _context.Pipe(duplex=False)
        self.processes = []
        for rank in range(count):
            seat = Seat(rank, count, f"file://{self._directory.name}/meeting")
            arguments = seat, policy, settings, dtype, lora, answers, scenario, pickle.dumps(rest)
            self.processes.append(_context.Process(target=_take_seat, args=arguments, daemon=True))
            self.processes[-1].start()
        answers.close()

    def answer(self) -> Any:
        """Return what the scenario returned, or raise EOFError if rank 0 has ended without it."""
        return pickle.loads(self._answers.recv_bytes())

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.join(PATIENCE)  # the others end when rank 0 has ended
        assert not any(process.is_alive() for process in self.processes)
        self._directory.cleanup()


def run_ranks(
    count: int,
    policy: Path,
    settings: LearnerSettings,
    scenario: Scenario,
    *rest: Any,
    dtype: torch.dtype,
    lora: LoraSpec | None = None,
) -> Any:
    """Return what a scenario returned on rank 0."""
    with Ranks(count, policy, settings, dtype, scenario, *rest, lora=lora) as ranks:
        return ranks.answer()


def _take_seat(
    seat: Seat,
    directory: Path,
    settings: LearnerSettings,
    dtype: torch.dtype,
    lora: LoraSpec | None,
    answers: "Connection[Any, Any]",
    scenario: Scenario,
    rest: bytes,
) -> None:
    torch.set_num_threads(1)
    prepare_rank(seat)
    model: CausalModel = build(Policy.load(directory), recompute=True, lora=lora)
    if lora is not None:
        model = LoraModel(model, load_weights(directory), dtype=dtype)
    learner = RankLearner(model, settings, join_ranks(seat, "cpu"), dtype)
    if seat.rank == 0:
        result = scenario(ShardedLearner(learner, random_weights(model)), *pickle.loads(rest))
        answers.send_bytes(pickle.dumps(result))  # multiprocessing would send descriptors that end with this process
        return
    answers.close()
    Thread(target=follow_reads, args=(learner,), daemon=True).start()
    follow_steps(learner)
