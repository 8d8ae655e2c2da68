"""What it would save to code changes by each element's history: when it last changed since an anchor, and which way.

    python -m bench.history RUN.TOML     of all versions of a run that `grailnode demo --keep` has kept

Beside patches, PULSE's format and the bound, the table has the bits of two adaptive codes, which begin without a model
and pay for what they learn. One codes places and signs given the old value's exponent; the other one is given the
history too, a byte for each element. Both code sizes given the exponent. A version of 135M parameters takes about 15 s
of CPU time.
"""

import argparse
import re
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from bench.measures import Update
from bench.published_formats import FORMATS
from bench.published_run import Weights, visit_versions
from bench.tables import print_table
from protocol import patch
from protocol.patch.values import bits_of, layout_of, to_keys

AGES: Final = (1, 2, 3, 4, 6, 8, 12, 16)
"""The largest age, in versions, of each context but the last."""
CONTEXTS: Final = 2 * (len(AGES) + 2)
SIZES: Final = 32


def adaptive_bits(counts: NDArray[np.int64]) -> float:
    """Return the bits in which an adaptive code sends symbols that occur so often, of one context in each row."""
    tally = torch.from_numpy(counts.astype(np.float64)).reshape(-1, counts.shape[-1])
    total, symbols = tally.sum(1), tally.shape[1]
    nats = torch.lgamma(total + symbols / 2) - torch.lgamma(torch.tensor(symbols / 2))
    nats -= (torch.lgamma(tally + 0.5) - torch.lgamma(torch.tensor(0.5))).sum(1)
    return float(nats.sum()) / float(np.log(2))


class History:
    """The history of all elements: the version of the last change, negative if it went down; 0 if there was none."""

    def __init__(self) -> None:
        self._old: Weights = {}
        self._last: dict[str, NDArray[np.int8]] = {}
        self._version = -1
        self.rows: list[list[str]] = []

    def add(self, weights: Weights) -> None:
        """Add the next version of the weights, of 127 at most, and a row of what its patch would take."""
        self._version += 1
        elements, changes = np.zeros((256, CONTEXTS), np.int64), np.zeros((256, CONTEXTS, SIZES, 2), np.int64)
        for name, tensor in weights.items():
            if self._version:
                self._count(name, self._old[name], tensor, elements, changes)
            else:
                self._last[name] = np.zeros(tensor.numel(), np.int8)
        old, self._old, count = self._old, weights, int(changes.sum())
        if count:
            old_bits, new_bits = ([bits_of(tensor) for tensor in own.values()] for own in (old, weights))
            pulse = FORMATS[0].encode(old_bits, new_bits, [tensor.shape[-1] for tensor in weights.values()])
            sizes = adaptive_bits(changes.sum((1, 3)))
            plain = _bits(elements.sum(1), changes.sum((1, 2))) + sizes
            with_history = _bits(elements, changes.sum(2)) + sizes
            costs = 8 * len(patch.encode(old, weights)), Update(old, weights).bound, 8 * len(pulse), plain, with_history
            row = [str(self._version), f"{count / int(elements.sum()):.3%}", *(f"{bits / count:.3f}" for bits in costs)]
            self.rows.append([*row, f"{1 - with_history / plain:.1%}"])

    def _count(
        self, name: str, old: torch.Tensor, new: torch.Tensor, elements: NDArray[np.int64], changes: NDArray[np.int64]
    ) -> None:
        """Count a tensor's elements by exponent and context, and its changes by size and direction too."""
        layout, before, after, last = layout_of(new.dtype), bits_of(old), bits_of(new), self._last[name]
        contexts = np.zeros(256, np.uint16)  # by the byte of `last`
        for version in range(1, self._version):
            age = 2 * (1 + int(np.searchsorted(AGES, self._version - version)))
            contexts[version], contexts[-version] = age, age + 1
        exponents = (before >> before.dtype.type(layout.group_shift)) & before.dtype.type(layout.exponents - 1)
        keys = exponents.astype(np.uint16) * np.uint16(CONTEXTS) + contexts[last.view(np.uint8)]
        elements += np.bincount(keys, minlength=elements.size).reshape(elements.shape)
        places = np.flatnonzero(before != after)
        steps = to_keys(after[places], layout).astype(np.int64) - to_keys(before[places], layout).astype(np.int64)
        symbols = (keys[places].astype(np.int64) * SIZES + np.minimum(np.abs(steps), SIZES) - 1) * 2 + (steps < 0)
        changes += np.bincount(symbols, minlength=changes.size).reshape(changes.shape)
        last[places] = np.where(steps < 0, -self._version, self._version)


def _bits(elements: NDArray[np.int64], changes: NDArray[np.int64]) -> float:
    """Return the bits of places and signs, given elements and changes (by sign, which is the last axis)."""
    changed = changes.sum(-1)
    return adaptive_bits(np.stack([elements - changed, changed], -1)) + adaptive_bits(changes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run.toml of the kept run")
    parser.add_argument("--tensors", default="", help="regular expression of the names of tensors to look at")
    arguments, history = parser.parse_args(), History()
    chosen = re.compile(arguments.tensors).search
    visit_versions(arguments.run, lambda new: history.add({name: new[name] for name in new if chosen(name)}))
    columns = ("version", "changed", "compact", "bound", FORMATS[0].name, "adaptive", "with history", "saved")
    print_table("bits a change, with the history since version 0", columns, history.rows)


if __name__ == "__main__":
    main()
