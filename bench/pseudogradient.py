"""Size and speed of contributions (docs/spec/pseudogradient.md).

    python -m bench.pseudogradient sizes     bits an entry by coding and learning rate, on the demo's policy
    python -m bench.pseudogradient rates     encode and decode, bytes of FP32 weights a second on one core
    python -m bench.pseudogradient indices   bits of k of 4096 entries, beside their entropy

`sizes` lets four sites train the demo's policy for some rounds with the real learner (bench/recorded_rounds.py), and
encodes what two of them did, with their error feedback. It takes about 2 minutes of CPU time for each learning rate.
`rates` draws weights and updates; rates are those of the fastest of `--repeats` runs. The paper's coding is varint gaps
and FP32 values under zstd-1. The commands need the `bench` extra.
"""

import argparse
import math
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import zstandard

from bench.measures import best_of
from bench.recorded_rounds import Floats, record
from bench.tables import print_table
from protocol import pseudogradient
from protocol.patch.fields import varint
from protocol.pseudogradient import Coding, Inputs, Kind, Part
from protocol.pseudogradient.chunk_frames import encode_chunks
from protocol.pseudogradient.chunks import CHUNK
from protocol.pseudogradient.contribution import ContributionEncoder, decode_part

CODINGS = {
    "exact": Coding(Kind.EXACT),
    "grid, f = 1": Coding(Kind.GRID, fraction=1),
    "grid, f = 2": Coding(Kind.GRID, fraction=2),
    "grid, f = 3": Coding(Kind.GRID, fraction=3),
    "grid, f = 4": Coding(Kind.GRID, fraction=4),
    "chunked, k = 32": Coding(Kind.CHUNKED, chosen=32),
    "chunked, k = 128": Coding(Kind.CHUNKED, chosen=128),
}


def published_bits(values: Floats) -> int:
    """Return the bits that the paper's coding takes for sparse values: varint gaps and FP32 values, zstd-1."""
    compressor, size = zstandard.ZstdCompressor(level=1), 0
    for tensor in values.values():
        flat = tensor.reshape(-1)
        places = np.flatnonzero(flat)
        gaps = np.diff(places, prepend=-1) - 1
        size += len(compressor.compress(b"".join(map(varint, gaps.tolist())) + flat[places].tobytes()))
    return 8 * size


@dataclass
class SiteTotals:
    """What one site sent with one coding in all rounds."""

    feedback: dict[str, torch.Tensor] | None = None
    entries: int = 0
    bits: int = 0
    published: int = 0
    elements: int = 0
    by_round: list[float] = field(default_factory=list)


def sizes(arguments: argparse.Namespace) -> None:
    """Print bits an entry and reductions by coding and learning rate."""
    rows = []
    for rate in map(float, arguments.learning_rates.split(",")):
        totals = {(name, site): SiteTotals() for name in CODINGS for site in range(2)}
        for round_record in record(rate, rounds=arguments.rounds):
            if round_record.site < 2:
                base, local = (
                    {name: torch.from_numpy(values) for name, values in floats.items()}
                    for floats in (round_record.base, round_record.local)
                )
                for name, coding in CODINGS.items():
                    _count(totals[name, round_record.site], coding, base, local)
        for name in CODINGS:
            own = [totals[name, site] for site in range(2)]
            entries, bits, elements = (sum(getattr(t, key) for t in own) for key in ("entries", "bits", "elements"))
            published = sum(t.published for t in own)
            rows.append([
                f"{rate:g}", name, f"{entries / elements:.2%}", f"{own[0].by_round[0]:.2%}, {own[0].by_round[-1]:.2%}",
                f"{bits / entries:.2f}", f"{published / entries:.1f}" if published else "",
                f"{32 * elements / bits:.1f}x", f"{8 * 32 * elements / bits:.0f}x",
            ])  # fmt: skip
    columns = ("rate", "coding", "sent", "first and last round", "bits/entry", "paper's", "of DiLoCo", "of DDP")
    print_table(f"{arguments.rounds} rounds of 8 local steps, four sites; two of them counted", columns, rows)


def _count(totals: SiteTotals, coding: Coding, base: dict[str, torch.Tensor], local: dict[str, torch.Tensor]) -> None:
    decay = 0.95 if coding.kind == Kind.CHUNKED else 1.0
    contribution = pseudogradient.encode(base, local, totals.feedback, coding, bytes(32), decay=decay)
    totals.feedback = contribution.residual
    entries, elements = sum(contribution.head.entries), sum(tensor.numel() for tensor in base.values())
    totals.entries += entries
    totals.elements += elements
    totals.bits += 8 * sum(map(len, contribution.payload))
    totals.by_round.append(entries / elements)
    if coding.kind == Kind.EXACT:
        decoded: Floats = {}
        for part, values in pseudogradient.decode(contribution.payload, base, bytes(32)):
            decoded |= {name: tensor.numpy() for name, tensor in part.scatter(values).items()}
        totals.published += published_bits(decoded)


def rates(arguments: argparse.Namespace) -> None:
    """Print the rates of encoding and decoding on one core."""
    shape = (arguments.rows, 4096)
    part, size = Part(("w",), (shape,)), arguments.rows * 4096
    random = np.random.default_rng(0)
    base = random.standard_normal(size, np.float32) * np.float32(0.0147)
    rows = []
    for update in map(float, arguments.updates.split(",")):
        local = base - random.standard_normal(size, np.float32) * np.float32(update)
        feedback = base - (base - random.standard_normal(size, np.float32) * np.float32(update / 4))  # of base's units
        for name in ("exact", "grid, f = 3", "chunked, k = 32", "chunked, k = 128"):
            coding = CODINGS[name]
            inputs = Inputs(base, local, feedback, 0.95 if coding.kind == Kind.CHUNKED else 1.0)
            encoder = ContributionEncoder(coding, bytes(32), bytes(32))
            encode = partial(encoder.add, part, inputs)
            encode()
            head, (file,) = encoder.finish()
            ((_, begin, end),), (entries,) = head.frames, head.entries
            frame = file[begin:end]
            decode = partial(decode_part, memoryview(frame), coding, part, base, entries)
            seconds = best_of(encode, arguments.repeats), best_of(decode, arguments.repeats)
            speeds = [f"{4 * size / own / 1e9:.2f}" for own in seconds]
            rows.append([name, f"{update:g}", f"{entries / size:.2%}", f"{8 * len(frame) / entries:.2f}", *speeds])
    columns = ("coding", "update", "sent", "bits/entry", "encode", "decode")
    print_table(f"{shape[0]} x {shape[1]} weights, GB/s of FP32 on one core", columns, rows)


def indices(arguments: argparse.Namespace) -> None:
    """Print the bits of an entry, index and level, for k of 4096."""
    rows = []
    random = np.random.default_rng(0)
    for chosen in (32, 64, 128, 256, 512):
        update = random.standard_normal(arguments.chunks * CHUNK).astype(np.float32)
        rest = update.copy()
        entries, frame = encode_chunks(rest, [(arguments.chunks * CHUNK,)], chosen)
        shares = np.unique((update - rest)[update != rest], return_counts=True)[1] / entries
        index, level = math.log2(math.comb(CHUNK, chosen)) / chosen, -float((shares * np.log2(shares)).sum())
        own = 8 * len(frame) / entries
        cells = (index, level, own)
        above = f"{own / (index + level) - 1:+.2%}", f"{(own - level) / index - 1:+.2%}"
        rows.append([str(chosen), *(f"{bits:.3f}" for bits in cells), *above])
    columns = ("k", "log2 C(4096, k) / k", "entropy of levels", "this code", "above both", "above the indices")
    print_table(f"bits an entry, {arguments.chunks} chunks of 4096", columns, rows)


def main() -> None:
    """Run the chosen benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("sizes", help="bits an entry on the demo's policy")
    command.add_argument("--learning-rates", default="7e-6,3e-6,1e-6", help="of the sites' AdamW")
    command.add_argument("--rounds", type=int, default=8, help="rounds of 8 local steps")
    command.set_defaults(run=sizes)
    command = commands.add_parser("rates", help="speed on one core")
    command.add_argument("--rows", type=int, default=4096, help="rows of 4096 weights")
    command.add_argument("--updates", default="2e-6,2e-5", help="standard deviation of the update")
    command.add_argument("--repeats", type=int, default=5, help="runs of which the fastest counts")
    command.set_defaults(run=rates)
    command = commands.add_parser("indices", help="bits of k of 4096")
    command.add_argument("--chunks", type=int, default=512, help="chunks")
    command.set_defaults(run=indices)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.run(arguments)


if __name__ == "__main__":
    main()
