"""Measurements of one patch format on one update: bytes, seconds each way, and peak extra memory."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bench.published_formats import FORMATS, Format
from bench.tables import print_table
from bench.xet import deduplicated
from grailnode.convert.inspect_patch import bound_bits
from protocol import patch
from protocol.digest import tensor_digest
from protocol.patch.codec import encode_unit_frame
from protocol.patch.container import read_header, split_frames, unit_row
from protocol.patch.frames import decode_frame
from protocol.patch.sparse import Scratch
from protocol.patch.values import Bits, bits_of
from tests.support.measuring.memory import peak_extra

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Update:
    """The weights before and after an update."""

    old: Weights
    new: Weights

    @property
    def nbytes(self) -> int:
        """The bytes of the full weights."""
        return sum(tensor.nbytes for tensor in self.old.values())

    @property
    def changed_count(self) -> int:
        """The number of elements that change."""
        return sum(int(np.count_nonzero(bits_of(self.old[name]) != bits_of(self.new[name]))) for name in self.old)

    @property
    def bound(self) -> float:
        """The least bits of a code that models changes by their exponents alone (docs/spec/patch.md, section 6)."""
        names = [name for name in self.old if not torch.equal(self.old[name], self.new[name])]
        return sum(
            bound_bits(self.old[name], self.new[name])
            * np.count_nonzero(bits_of(self.old[name]) != bits_of(self.new[name]))
            for name in names
        )


@dataclass(frozen=True)
class FormatCost:
    """The costs of one format.

    Attributes:
        name: name of the format.
        nbytes: bytes of the encoded update.
        encode, apply: seconds to encode and to apply it.
        encode_extra, apply_extra: peak memory in bytes beside inputs and outputs; None if not measured.
    """

    name: str
    nbytes: int
    encode: float
    apply: float
    encode_extra: int | None
    apply_extra: int | None


def clock() -> float:
    """Return wall time in seconds; if PATCH_BENCH_CPU is set, this thread's CPU time, for a machine with other work."""
    return time.thread_time() if "PATCH_BENCH_CPU" in os.environ else time.perf_counter()


def best_of(work: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the fastest of several runs, by `clock`."""
    seconds = []
    for _ in range(repeats):
        begin = clock()
        work()
        seconds.append(clock() - begin)
    return min(seconds)


def measure_codec(update: Update, profile: str, repeats: int) -> FormatCost:
    """Measure the codec alone, without digests and new tensors. The bytes are those of the whole patch."""
    data = patch.encode(update.old, update.new, profile=profile)
    header = read_header(data)
    units = list(split_frames(data, header, header.table.units(update.old)))
    changed = [(rows, frame) for rows, frame in units if rows[-1].size]
    names = [tuple(row.name for row in rows) for rows, _ in units]
    targets = {
        rows[-1].name: np.empty(unit_row(rows).elements, bits_of(update.old[rows[-1].name]).dtype)
        for rows, _ in changed
    }
    workspace = Scratch()

    def encode(space: Scratch) -> None:
        for unit in names:
            pairs = [(bits_of(update.old[name]), bits_of(update.new[name])) for name in unit]
            encode_unit_frame(pairs, update.new[unit[-1]], profile, space)

    def decode() -> None:
        for rows, frame in changed:
            before = [bits_of(update.old[row.name]) for row in rows]
            whole = before[0] if len(before) == 1 else np.concatenate(before)
            for _ in decode_frame(unit_row(rows), frame, whole, targets[rows[-1].name]):
                pass

    return FormatCost(
        f"grailnode {profile}", len(data), best_of(lambda: encode(workspace), repeats), best_of(decode, repeats),
        peak_extra(lambda: encode(Scratch())), peak_extra(decode),
    )  # fmt: skip


def measure_whole(update: Update, profile: str, repeats: int) -> FormatCost:
    """Measure encoding and applying as trainer and follower do: new digests, new tensors and all checks.

    The digests of the old weights are known before.
    """
    data = patch.encode(update.old, update.new, profile=profile)
    digests = {name: tensor_digest(tensor) for name, tensor in update.old.items()}

    def encode() -> object:
        return patch.encode(update.old, update.new, profile=profile, base_digests=digests)

    def apply() -> object:
        return patch.apply_with_digests(update.old, data, digests=digests)

    return FormatCost(
        f"grailnode {profile}, with digests", len(data), best_of(encode, repeats), best_of(apply, repeats),
        peak_extra(encode), max(0, peak_extra(apply) - _bytes_of_changed_tensors(update)),
    )  # fmt: skip


def _bytes_of_changed_tensors(update: Update) -> int:
    return sum(new.nbytes for name, new in update.new.items() if not torch.equal(new, update.old[name]))


def measure_published_format(update: Update, form: Format, repeats: int) -> FormatCost:
    """Measure a published format, without digests, and check its result bit for bit."""
    names = sorted(update.old)
    old, new = ([bits_of(weights[name]) for name in names] for weights in (update.old, update.new))
    columns = [update.old[name].shape[-1] if update.old[name].dim() else 1 for name in names]

    def encode() -> bytes:
        return form.encode(old, new, columns)

    data = encode()

    def decode() -> list[Bits]:
        return form.decode(old, data, columns)

    assert all(np.array_equal(one, other) for one, other in zip(decode(), new, strict=True)), form.name
    return FormatCost(
        form.name, len(data), best_of(encode, repeats), best_of(decode, repeats),
        peak_extra(encode), max(0, peak_extra(decode) - update.nbytes),
    )  # fmt: skip


def measure_xet(updates: Sequence[Update]) -> list[FormatCost]:
    """Measure hf-xet on consecutive updates. To apply an update is to download the whole version into a file."""
    rows = deduplicated([updates[0].old, *(update.new for update in updates)])
    return [FormatCost("hf-xet chunks, local store", row.nbytes, row.upload, row.download, None, None) for row in rows]


def measure_all(updates: Sequence[Update], repeats: int, *, quick: bool) -> list[FormatCost]:
    """Measure every format on consecutive updates and return the sums."""
    kinds: list[Callable[[Update], FormatCost]] = [
        lambda update, profile=profile, measure=measure: measure(update, profile, repeats)  # type: ignore[misc]
        for profile in patch.PROFILES
        for measure in (measure_codec, measure_whole)
    ]
    kinds += [lambda update, form=form: measure_published_format(update, form, 1 if quick else 2) for form in FORMATS]  # type: ignore[misc]
    columns = [[kind(update) for update in updates] for kind in kinds]
    return [total(rows) for rows in [*columns, measure_xet(updates)]]


def total(rows: Sequence[FormatCost]) -> FormatCost:
    """Return the sums of one format's bytes and seconds over several updates, and its largest peaks of memory."""
    return FormatCost(
        rows[0].name,
        sum(row.nbytes for row in rows),
        sum(row.encode for row in rows),
        sum(row.apply for row in rows),
        max((row.encode_extra for row in rows if row.encode_extra is not None), default=None),
        max((row.apply_extra for row in rows if row.apply_extra is not None), default=None),
    )


HEADINGS = (
    "format", "bits/change", "of bound", "of PULSE", "x full", "encode GB/s", "apply GB/s", "extra MB, encode", "apply",
)  # fmt: skip


def print_costs(title: str, rows: Sequence[FormatCost], updates: Sequence[Update]) -> None:
    """Print a row for each format; the title has the bound."""
    nbytes, changed_count = sum(update.nbytes for update in updates), sum(update.changed_count for update in updates)
    bound = sum(update.bound for update in updates) / max(1, changed_count)
    elements = sum(tensor.numel() for update in updates for tensor in update.old.values())
    heading = f"{title}, {changed_count / elements:.3%} changed, bound {bound:.3f} bits a change"
    pulse = next(row.nbytes for row in rows if row.name == "PULSE COO + zstd-1")
    table = []
    for row in rows:
        bits = row.nbytes * 8 / max(1, changed_count)
        table.append([
            row.name, f"{bits:.3f}", f"{bits / bound:.3f}" if bound else "-", f"{row.nbytes / pulse:.3f}",
            f"{nbytes / row.nbytes:.1f}", f"{nbytes / 1e9 / row.encode:.3g}", f"{nbytes / 1e9 / row.apply:.3g}",
            _megabytes(row.encode_extra), _megabytes(row.apply_extra),
        ])  # fmt: skip
    print_table(heading, HEADINGS, table)


def _megabytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 1e6:.1f}"
