"""A loop of your own on FSDP2. Called again, it goes on from its last checkpoint, on any number of ranks.

torchrun --nproc-per-node 2 examples/fsdp2.py run/run.toml checkpoints 100
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from grailnode.library import Group, open_trainer


def loss_of(model: torch.nn.Module, group: Group, i: int, temperature: float) -> torch.Tensor:
    """Return the sum over a completion's tokens of PPO's clipped loss, with the advantage of Dr. GRPO."""
    ids = torch.tensor([group.prompt + group.completions[i]])
    logits = model(ids).logits[0, len(group.prompt) - 1 : -1] / temperature
    log_probs = torch.log_softmax(logits, -1)[range(len(logits)), ids[0, len(group.prompt) :]]
    advantage = group.rewards[i] - sum(group.rewards) / len(group.rewards)
    ratio = (log_probs - torch.from_numpy(group.logprobs[i])).exp()
    objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    return -(objective * torch.tensor(group.drawn[i])).sum()  # an environment's tokens have no part


dist.init_process_group(timeout=timedelta(hours=2))  # longer than any wait for groups
ranks, directory = dist.get_world_size(), Path(sys.argv[2])
with open_trainer(sys.argv[1], ranks=dist.group.WORLD) as net:
    model = AutoModelForCausalLM.from_pretrained(net.policy, dtype=torch.float32)
    for module in (*model.model.layers, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=7e-6, betas=(0.9, 0.95), weight_decay=0.0)
    saved = sorted(path.parent for path in directory.glob("*/.metadata"))
    if saved:
        state = {"weights": model, "moments": get_optimizer_state_dict(model, optimizer), "learned": []}
        dcp.load(state, checkpoint_id=saved[-1])
        set_optimizer_state_dict(model, optimizer, state["moments"])
        net.acknowledge(state["learned"])
    for step in range(int(saved[-1].name) + 1 if saved else 1, int(sys.argv[3]) + 1):
        groups = net.groups(4, 4)  # the same on all ranks
        samples = [(group, i) for group in groups for i in range(len(group.completions))]
        assert len(samples) % ranks == 0, "each rank needs as many completions"
        tokens = max(1, sum(sum(group.drawn[i]) for group, i in samples))
        for group, i in samples[dist.get_rank() :: ranks]:
            (loss_of(model, group, i, net.run.sampling.temperature) * ranks / tokens).backward()  # FSDP averages ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        state = {"weights": model, "moments": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state | {"learned": [group.digest for group in groups]}, checkpoint_id=directory / f"{step:08d}")
        net.acknowledge(groups)
        net.publish(model.state_dict(), step=step)
    net.wait_for_uploads()
os._exit(0)  # gloo's threads live on: one that frees a tensor while Python ends would abort the process
