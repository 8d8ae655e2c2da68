"""Run a command as on an older processor: the numerical libraries leave out instruction sets that this one has.

    python -m tests.support.processes.dispatches NAME COMMAND ...

Libraries choose their code by the processor: libm with or without fused multiply-add, numpy, OpenBLAS and torch by the
width of vectors, numba by the processor's name. Their results differ in the last bits. Each line of DISPATCHES makes
all of them choose as on one older processor, as far as switches reach. The command starts only if every library says
that it did; a line shows what they say.
"""

import importlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import ne
from typing import Any, Final

POWERS: Final = 20_000


@dataclass(frozen=True)
class Dispatch:
    """What the libraries use.

    Attributes:
        glibc: names of the features that libm does without.
        numpy: those of numpy's optional features that it keeps; their names depend on its version.
        openblas, torch, mkl, onednn, numba: the name that each has for the instruction set; torch computes products
            with MKL and oneDNN.
    """

    glibc: tuple[str, ...]
    numpy: tuple[str, ...]
    openblas: str
    torch: str
    mkl: str
    onednn: str
    numba: str


_NO_AVX512: Final = ("AVX512F", "AVX512DQ", "AVX512BW", "AVX512VL")
_NO_AVX2: Final = ("AVX2", "FMA", "FMA4", *_NO_AVX512)

DISPATCHES: Final = {
    "haswell": Dispatch(_NO_AVX512, ("X86_V3", "AVX2", "FMA3"), "Haswell", "AVX2", "AVX2", "AVX2", "haswell"),
    "sandybridge": Dispatch(_NO_AVX2, (), "Sandybridge", "DEFAULT", "COMPATIBLE", "AVX", "sandybridge"),
    "nehalem": Dispatch(_NO_AVX2, (), "Nehalem", "DEFAULT", "COMPATIBLE", "SSE41", "nehalem"),
}


def environment(dispatch: Dispatch) -> dict[str, str]:
    """Return the variables that make the libraries of a process choose as a dispatch says."""
    others = set(_numpy_features()) - set(dispatch.numpy)
    return {
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=" + ",".join(f"-{name}" for name in dispatch.glibc),
        "NPY_DISABLE_CPU_FEATURES": " ".join(sorted(others)),
        "OPENBLAS_CORETYPE": dispatch.openblas,
        "ATEN_CPU_CAPABILITY": dispatch.torch.lower(),
        "MKL_CBWR": dispatch.mkl,
        "ONEDNN_MAX_CPU_ISA": dispatch.onednn,
        "NUMBA_CPU_NAME": dispatch.numba,
        "NUMBA_CPU_FEATURES": "",
    }


def _numpy_features() -> list[str]:
    """Return the optional features that numpy uses in this process."""
    core: Any = importlib.import_module("numpy._core._multiarray_umath")
    return [name for name in core.__cpu_dispatch__ if core.__cpu_features__.get(name)]


def observe() -> dict[str, Any]:
    """Return what the libraries of this process say, and results in which libm and MKL show what they use."""
    import numba
    import numpy as np
    import torch
    from threadpoolctl import threadpool_info

    # the same factors under every dispatch; torch's own normal numbers would differ, whatever MKL does
    factors = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, (2, 200, 200)).astype(np.float32))
    powers = [math.pow(1.0 + number / POWERS, 1.5 + number % 97) for number in range(POWERS)]
    return {
        "numpy": _numpy_features(),
        "openblas": sorted({pool["architecture"] for pool in threadpool_info() if pool["internal_api"] == "openblas"}),
        "torch": torch.backends.cpu.get_cpu_capability(),
        "numba": vars(numba.core.config)["CPU_NAME"],
        "onednn": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "products": (factors[0] @ factors[1]).flatten().tolist(),
        "powers": powers,
    }


def observe_in(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return what `observe` returns in a process with more variables."""
    run = subprocess.run(
        [sys.executable, "-m", __spec__.name, "observe"],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        check=True,
    )
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def failures(dispatch: Dispatch, seen: Mapping[str, Any], native: Mapping[str, Any]) -> list[str]:
    """Return which libraries do not use what a dispatch says, a line for each.

    Args:
        seen: by `observe` in a process with the dispatch; native: in one without.
    """
    lines = []
    if not set(seen["numpy"]) <= set(dispatch.numpy):
        lines.append(f"numpy uses {' '.join(seen['numpy'])}")
    for library, name in (("openblas", dispatch.openblas), ("torch", dispatch.torch), ("numba", dispatch.numba)):
        if seen[library] not in (name, [name]):
            lines.append(f"{library} uses {seen[library]} instead of {name}")
    if seen["onednn"]:
        lines.append("oneDNN uses AVX-512")
    if dispatch.mkl == "COMPATIBLE" and seen["products"] == native["products"]:
        lines.append("MKL computes the same products as without the switch")
    has_fma = bool({"X86_V3", "FMA3"} & set(native["numpy"]))
    if "FMA" in dispatch.glibc and has_fma and seen["powers"] == native["powers"]:
        lines.append("libm computes the same powers as without the switch")
    return lines


def describe(seen: Mapping[str, Any], native: Mapping[str, Any]) -> str:
    """Return a line that says what the libraries use, and how much of what they compute differs."""
    names = "; ".join(
        f"{library} {seen[library]}, here {native[library]}"
        for library in ("numpy", "openblas", "torch", "onednn", "numba")
    )
    counts = {name: sum(map(ne, seen[name], native[name])) for name in ("powers", "products")}
    return (
        f"{counts['powers']} of {POWERS} powers of libm and {counts['products']} of {len(seen['products'])} elements "
        f"of a product in torch differ from this processor's; {names}"
    )


def main(arguments: Sequence[str]) -> int:
    if arguments == ["observe"]:
        print(json.dumps(observe()))
        return 0
    if len(arguments) < 2 or arguments[0] not in DISPATCHES or platform.machine() != "x86_64":
        print(f"usage, on x86-64: {__spec__.name} {'|'.join(DISPATCHES)} COMMAND ...", file=sys.stderr)
        return 2
    name, command = arguments[0], arguments[1:]
    if shutil.which(command[0]) is None:
        print(f"{command[0]}: no such command", file=sys.stderr)
        return 2
    variables = environment(DISPATCHES[name])
    native, seen = observe_in({}), observe_in(variables)
    if problems := failures(DISPATCHES[name], seen, native):
        print(f"dispatch {name} has not taken effect: {'; '.join(problems)}", file=sys.stderr)
        return 1
    print(f"dispatch {name}: {describe(seen, native)}", flush=True)
    return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
