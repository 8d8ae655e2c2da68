"""Makes the demo's genesis policy from a seed: `python -m grailnode.genesis --seed 0 --out DIR`.

It stands for a pre-trained model: a small Qwen3 with a character tokenizer that *can* add two-digit numbers but is undecided,
because in the corpus it was supervised on most answers get the carry wrong. So reinforcement elicits rather than teaches,
and learning rates that leave nine BF16 weights of ten untouched suffice.

Training runs in float64: rounding differences between processors stay far below the spacing of BF16, in which the result is
kept, so the same seed gives the same file.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken, Regex
from tokenizers import Tokenizer as _Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from torch.nn import functional

from grailnode import policy
from grailnode.engine.qwen3 import Qwen3, Qwen3Config
from protocol.environments.draws import Draws
from protocol.environments import get
from roles.trainer.optimizer import AdamW, AdamWSettings
from roles.sequences import PaddedBatch, Tokens, pad

PACKAGED: Final = Path(__file__).parent / "data" / "genesis"
"""The policy directory that ships with the package, made with seed 0."""

_SPECIAL: Final = ("<pad>", "<eos>", "<unk>")
_CHARACTERS: Final = "0123456789+-*/=()> "


@dataclass(frozen=True)
class Recipe:
    """How the genesis is made.

    Attributes:
        width, layers, heads, pairs, head_size, feed_forward: the transformer.
        initial_std: standard deviation of the initial weights.
        right: share of the corpus whose carry is right.
        steps, batch: of the supervised training; learning_rate falls linearly to zero after a warm-up.
    """

    width: int = 128
    layers: int = 4
    heads: int = 4
    pairs: int = 2
    head_size: int = 32
    feed_forward: int = 352
    initial_std: float = 0.02
    right: float = 0.4
    steps: int = 1500
    batch: int = 256
    learning_rate: float = 2e-3
