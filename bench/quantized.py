"""Patches of quantized versions beside those of BF16 versions, and learning with quantized weights.

    python -m bench.quantized steps
    python -m bench.quantized demo
    python -m bench.quantized policy DIR --precision fp8

`steps` takes one matrix of bench.checkpoints (60 steps of AdamW) at several learning rates, and publishes the last two
masters in each precision. `as values` is the patch of the same values in BF16. It also counts the rows that get another
scale, and the codes that would change with other scales: with those of the first weights for ever, and with the row's
largest weight over the largest code. 20 CPU seconds and 1 GB with the defaults.

`demo` lets the packaged policy learn by bench.learning's simulation and publishes each of its masters in each
precision; then it learns with each precision. About 15 CPU seconds a row.

`policy` writes the packaged policy with the values of its codes, for `grailnode calibrate --policy DIR`, which measures
how far honest nodes of a quantized run differ.
"""

import argparse
import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from bench.checkpoints import simulate
from grailnode.engine.policy import PACKAGED_POLICY, load_weights
from protocol import patch
from protocol.digest import Weights
from protocol.patch.values import bits_of
from protocol.quantization import SCALE, Precision, dequantize, encode, quantize, round_matrix, row_scales
from tests.support.builders import genesis
from tests.support.simulation.learning import Setup, Simulation

_MATRIX: Final = "model.layers.0.mlp.up_proj.weight"
_RATES: Final = (1e-6, 3e-6, 1e-5)
_PRECISIONS: Final[tuple[Precision, ...]] = ("bf16", "fp8", "int8")
_QUANTIZED: Final[tuple[Precision, ...]] = ("fp8", "int8")
_LARGEST: Final = {"fp8": 448.0, "int8": 127.0}
_DTYPES: Final = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_LAST: Final = 8  # versions of which patches are averaged


def _changed(old: Tensor, new: Tensor) -> float:
    """Return the share of elements whose bits differ."""
    return float((bits_of(old.contiguous()) != bits_of(new.contiguous())).mean())


def _with_scales(matrix: Tensor, scales: Tensor, precision: Precision) -> Tensor:
    """Return codes with scales of other weights; what outgrows them is clipped."""
    limits = _LARGEST[precision] * scales.to(torch.float32)[:, None]
    return encode(torch.maximum(torch.minimum(matrix, limits), -limits), scales, precision)


def _with_float_scales(matrix: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    """Return codes with the row's largest weight over the largest code as scale, and the values of the codes."""
    scales = matrix.abs().amax(dim=1, keepdim=True) / _LARGEST[precision]
    scaled = matrix / scales
    codes = (scaled.round() if precision == "int8" else scaled).to(_DTYPES[precision])
    return codes, codes.to(torch.float32) * scales


def _error(values: Tensor, matrix: Tensor) -> float:
    return float((values - matrix).norm() / matrix.norm())


def _steps(rows: int, columns: int, rates: list[float], seed: int) -> None:
    trajectory = simulate(rows, columns, seed)
    print(f"{rows} x {columns}, the 60th step; bytes for a million weights")
    print("  rate precision   changed  sparsity  patch bytes  bits a change  as values", end="")
    print("  rescaled  scales kept  float scales")
    for rate in rates:
        old, new = (trajectory.start + rate * drift for drift in (trajectory.before, trajectory.after))
        for precision in _PRECISIONS:
            before, after = (quantize({_MATRIX: matrix}, precision) for matrix in (old, new))
            changed = _changed(before[_MATRIX], after[_MATRIX])
            size = len(patch.encode(before, after)) / old.numel()
            line = f"{rate:6.0e} {precision:<9} {changed:9.4%} {1 - changed:9.4%}"
            if precision == "bf16":
                print(f"{line} {size * 1e6:12,.0f} {8 * size / changed:14.2f}", flush=True)
                continue
            values = len(patch.encode(dequantize(before), dequantize(after))) / old.numel()
            rescaled = _changed(before[_MATRIX + SCALE], after[_MATRIX + SCALE])
            first = row_scales(trajectory.start, precision)
            kept = _changed(*(_with_scales(matrix, first, precision) for matrix in (old, new)))
            floating = _changed(*(_with_float_scales(matrix, precision)[0] for matrix in (old, new)))
            print(
                f"{line} {size * 1e6:12,.0f} {8 * size / changed:14.2f} {values * 1e6:10,.0f} {rescaled:9.3%} "
                f"{kept:12.4%} {floating:13.4%}",
                flush=True,
            )
    print(
        "error of the values, of the weights' norm: with powers of two, with the largest weight over the largest code"
    )
    for precision in _QUANTIZED:
        own = _error(round_matrix(trajectory.start, precision, torch.float32), trajectory.start)
        floating = _error(_with_float_scales(trajectory.start, precision)[1], trajectory.start)
        print(f"{precision:<9} {own:.3%} {floating:.3%}")


def _row(name: str, versions: list[Weights]) -> str:
    pairs = list(pairwise(versions))[-_LAST:]
    elements = sum(tensor.numel() for tensor in versions[0].values())
    size = sum(tensor.nbytes for tensor in versions[0].values())
    changes = [sum(int((bits_of(old[n]) != bits_of(new[n])).sum()) for n in old) for old, new in pairs]
    patches = [len(patch.encode(old, new)) for old, new in pairs]
    changed = statistics.fmean(changes) / elements
    return (
        f"{name:<9} {size / 1e3:9,.0f} kB {changed:9.3%} {1 - changed:9.3%} {statistics.fmean(patches) / 1e3:8.1f} kB"
    )


def _demo(windows: int, rate: float, seeds: list[int]) -> None:
    simulation = Simulation(Setup(windows=windows, learning_rate=rate, held_out=1), keep_masters=True)
    for number in range(windows):
        simulation.window(number)
    print(
        f"one training of {windows} windows in BF16, its masters published in each precision: the last {_LAST} versions"
    )
    print("precision   version   changed  sparsity    patch")
    for precision in _PRECISIONS:
        print(_row(precision, [quantize(one, precision) for one in simulation.masters[-_LAST - 1 :]]), flush=True)
    print("trainings of their own: pass@1 of version 0, and after the last window")
    for precision in _PRECISIONS:
        for seed in seeds:
            simulation = Simulation(Setup(windows=windows, learning_rate=rate, precision=precision, seed=seed))
            simulation.serve(0)
            first = simulation.pass_at_1()
            last = [simulation.window(number)["pass_at_1"] for number in range(windows)][-1]
            row = _row(precision, list(simulation.versions[-_LAST - 1 :]))
            costs = [simulation.costs.seconds[phase] / windows for phase in ("training", "staging")]
            cost = f"{costs[0]:.3f} and {costs[1]:.3f} CPU seconds a window for training and staging"
            print(f"{row}  seed {seed}: {first:.3f} {last:.3f}  {cost}", flush=True)


def _write_policy(directory: Path, precision: Precision) -> None:
    """Write the packaged policy with the values of its codes."""
    config, tokenizer = ((PACKAGED_POLICY / name).read_text() for name in ("config.json", "tokenizer.json"))
    genesis.save(
        directory, json.loads(config), tokenizer, dequantize(quantize(load_weights(PACKAGED_POLICY), precision))
    )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["steps", "demo", "policy"])
    parser.add_argument("directory", nargs="?", type=Path, help="that `policy` writes")
    parser.add_argument("--precision", choices=_QUANTIZED, default="fp8", help="of `policy`")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--rates", default=",".join(f"{rate:g}" for rate in _RATES), help="learning rates of `steps`")
    parser.add_argument("--windows", type=int, default=20, help="windows of `demo`")
    parser.add_argument("--rate", type=float, default=Setup.learning_rate, help="learning rate of `demo`")
    parser.add_argument("--seeds", default="0", help="seeds of the trainings of their own")
    parser.add_argument("--seed", type=int, default=0, help="seed of `steps`")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command == "steps":
        _steps(arguments.rows, arguments.columns, [float(rate) for rate in arguments.rates.split(",")], arguments.seed)
    elif arguments.command == "policy":
        _write_policy(arguments.directory, arguments.precision)
    else:
        _demo(arguments.windows, arguments.rate, [int(seed) for seed in arguments.seeds.split(",")])


if __name__ == "__main__":
    main()
