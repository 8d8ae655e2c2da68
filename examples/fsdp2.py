"""A loop of your own on FSDP2, as torchtitan shards models: all ranks compute, and rank 0 has the run's node.

    torchrun --nproc-per-node 2 examples/fsdp2.py run/run.toml checkpoints 100

Called again, it goes on from its last checkpoint, on any number of ranks.
"""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import grailnode
from grailnode.library import Group, Trainer

GROUPS = 4  # of a step


def on_rank_0(function: Callable[[], Any]) -> Any:
    """Call a function on rank 0, and return its result on all ranks."""
    result = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result)
    return result[0]


def loss_of(model: torch.nn.Module, group: Group, i: int, temperature: float) -> torch.Tensor:
    """Return the sum over a completion's tokens of PPO's clipped loss with GRPO's advantage."""
    ids = torch.tensor([group.prompt + group.completions[i]])
    logits = model(ids).logits[0, len(group.prompt) - 1 : -1] / temperature
    log_probs = torch.log_softmax(logits, -1)[range(len(logits)), ids[0, len(group.prompt) :]]
    rewards = torch.tensor(group.rewards)
    advantage = (rewards[i] - rewards.mean()) / (rewards.std() + 1e-6)
    ratio = (log_probs - torch.from_numpy(group.logprobs[i])).exp()
    objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    return -(objective * torch.tensor(group.drawn[i])).sum()  # an environment's tokens have no part


def train(net: Trainer | None, directory: Path, steps: int) -> None:
    policy, temperature = on_rank_0(lambda: (net.policy, net.run.sampling.temperature))
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=7e-6, betas=(0.9, 0.95), weight_decay=0.0)
    learned: list[bytes] = []  # digests of the groups that the weights were made from
    if checkpoints := on_rank_0(lambda: sorted(path.parent for path in directory.glob("*/.metadata"))):
        weights, moments = get_state_dict(model, optimizer)
        state = {"weights": weights, "moments": moments, "learned": learned}
        dcp.load(state, checkpoint_id=checkpoints[-1])
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        learned = state["learned"]
    for step in range(len(learned) // GROUPS + 1, steps + 1):
        groups, again = on_rank_0(lambda: take_groups(net, set(learned)))
        samples = [(group, i) for group in groups for i in range(len(group.completions))]
        tokens = max(1, sum(sum(group.drawn[i]) for group, i in samples))
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for place in range(rank, len(samples) + -len(samples) % ranks, ranks):  # as many on each: all compute layers
            share = ranks / tokens if place < len(samples) else 0.0  # FSDP takes the mean over ranks
            (loss_of(model, *samples[place % len(samples)], temperature) * share).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        learned.extend(group.digest for group in groups)
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"weights": weights, "moments": moments, "learned": learned}, checkpoint_id=directory / f"{step:08d}")
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if net is not None:
            net.acknowledge(groups + again)
            net.publish(whole, step=step)
    if net is not None:
        net.wait_for_uploads()


def take_groups(net: Trainer, learned: set[bytes]) -> tuple[list[Group], list[Group]]:
    """Return the groups of a step, and those that came again after a crash."""
    new: list[Group] = []
    again: list[Group] = []
    while len(new) < GROUPS:
        for group in net.groups(max_count=GROUPS - len(new)):
            (again if group.digest in learned else new).append(group)
    return new, again


def main() -> None:
    run, directory, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group(timeout=timedelta(hours=2))  # longer than any wait for groups
    with ExitStack() as stack:
        train(stack.enter_context(grailnode.open_trainer(run)) if dist.get_rank() == 0 else None, directory, steps)
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads live on: one that frees a tensor while Python ends would abort the process


if __name__ == "__main__":
    main()
