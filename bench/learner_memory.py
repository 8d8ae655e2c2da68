"""Peak memory and time of one training step, by the number of tokens whose logits are in memory at once.

    python -m bench.learner_memory --tokens 4096 --vocabulary 151936

Each row is a process of its own. The model is small (two layers of width 64) with a real model's vocabulary, so that
logits are what takes the memory.
"""

import argparse
import resource
import subprocess
import sys
import time

import torch

from grailnode.engine.qwen3 import Qwen3, Qwen3Config
from roles.trainer.learn.learner import Learner, LearnerSettings
from tests.support.builders.policies import random_weights
from tests.support.builders.verified_batches import make_group

_PROMPT, _LENGTH = 16, 256


def _measure(tokens: int, vocabulary: int, chunk: int) -> None:
    """Print peak memory above that before the step, in MiB, and seconds."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
    )
    model = Qwen3(config)
    completions = torch.randint(vocabulary, (tokens // _LENGTH, _LENGTH)).tolist()
    logprobs = [torch.full((_LENGTH,), -10.0) for _ in completions]
    rewards = [float(index % 2) for index in range(len(completions))]
    group = make_group(bytes(32), 0, range(_PROMPT), completions, logprobs, rewards)
    learner = Learner(model, random_weights(model), LearnerSettings(logits_chunk=chunk))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    began = time.process_time()
    learner.step([group])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{chunk:>13} {peak - before:>21.0f} {time.process_time() - began:>12.1f}")


def main() -> None:
    """Measure each chunk in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--chunk", type=int, help="measure this one in this process")
    arguments = parser.parse_args()
    if arguments.chunk is not None:
        _measure(arguments.tokens, arguments.vocabulary, arguments.chunk)
        return
    print("tokens/chunk  peak above start, MiB  CPU seconds", flush=True)
    for chunk in (256, 1024, arguments.tokens):
        options = ["--tokens", str(arguments.tokens), "--vocabulary", str(arguments.vocabulary), "--chunk", str(chunk)]
        subprocess.run([sys.executable, "-m", "bench.learner_memory", *options], check=True)


if __name__ == "__main__":
    main()
