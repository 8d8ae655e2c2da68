"""How far honest computations of one policy differ, and how far copies of it are off: `python -m bench.thresholds`.

Honest rows generate with one batch size and check with another. The others generate with weights that carry noise. Columns:
share of positions whose sketch agrees within 0, 1, 2 and 3 units; share of tokens with no margin and with a margin of at most
1e-4 and 0.02; the largest margin.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import trio

from grailnode import genesis
from grailnode.engine import model as models
from grailnode.engine.torch_engine import TorchEngine
from grailnode.policy import Policy, load_weights
from protocol import environments, sampling, sketch
from protocol.digest import Weights
from protocol.sampling import SamplingParams
from roles.ports import Request

HONEST = ((8192, 8192), (512, 8192), (8192, 100), (300, 2000))
PERTURBATIONS = (0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1)


async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """Compute in place."""
    await trio.lowlevel.checkpoint()
    return function(*arguments)


def perturbed(weights: Weights, relative: float) -> dict[str, torch.Tensor]:
    """Every weight off by a normal factor of this standard deviation."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: tensor * (1 + relative * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in weights.items()
    }


async def measure(rollouts: int) -> None:
    """Print the table."""
    policy, weights = Policy.load(genesis.PACKAGED), load_weights(genesis.PACKAGED)
    model = models.build(policy)
    task = environments.get("addition")
    params = SamplingParams(1.0, 8, policy.eos)
    prompts = [policy.tokenizer.encode(task.problem(i.to_bytes(32, "little")).prompt) for i in range(rollouts)]
    requests = [Request(prompt, i.to_bytes(16, "little")) for i, prompt in enumerate(prompts)]

    async def engine(held: Weights, batch_tokens: int) -> TorchEngine:
        made = TorchEngine(model, run_sync=inline, max_batch_tokens=batch_tokens)
        await made.stage(0, held)
        await made.commit()
        return made

    async def row(label: str, held: Weights, generating: int, checking: int) -> None:
        done = await (await engine(held, generating)).generate(requests, params)
        seen = await (await engine(weights, checking)).forward(prompts, [item.tokens for item in done])
        claimed = sketch.commit("projection", torch.cat([item.hidden for item in done]), bytes(32))
        due = sketch.commit("projection", torch.cat([item.hidden for item in seen]), bytes(32))
        tokens = torch.tensor([token for item in done for token in item.tokens])
        lengths = [len(item.tokens) for item in done]
        seeds = [request.seed for request in requests]
        margins = sampling.batch_margins(torch.cat([item.logits for item in seen]), tokens, seeds, lengths, 1.0)
        shares = [sketch.compare(claimed, due, tolerance).share_within for tolerance in range(4)]
        within = [float((margins <= bound).double().mean()) for bound in (0.0, 1e-4, 0.02)]
        print(
            f"{label:24} {len(tokens):6} tokens  sketch "
            + " ".join(f"{share:.4f}" for share in shares)
            + "  margin "
            + " ".join(f"{share:.5f}" for share in within)
            + f"  worst {float(margins.max()):.2g}"
        )

    for generating, checking in HONEST:
        await row(f"honest {generating}/{checking}", weights, generating, checking)
    for relative in PERTURBATIONS:
        await row(f"weights off by {relative:g}", perturbed(weights, relative), 8192, 8192)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=2000)
    torch.set_num_threads(1)
    trio.run(measure, parser.parse_args().rollouts)
