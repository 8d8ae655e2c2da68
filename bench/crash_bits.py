"""The same weights after kill -9 of real processes: `python -m bench.crash_bits --kills 100 --versions 40`.

A trainer (supervisor, training, upload, download, beacon) is fed the same groups twice, the next ones when the version
before is
published: once undisturbed, and once while its processes are killed at random times. Prints the kills by process and
whether every version has the same digest; exits with 1 where one has not.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.support.processes.fed_trainer import FedTrainer, make


def main() -> None:
    """Read the options, live twice, compare."""
    parser = argparse.ArgumentParser(prog="python -m bench.crash_bits", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--versions", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="grailnode-bits-") as folder:
        made = make(Path(folder) / "lived")
        shutil.copytree(made, Path(folder) / "killed")
        lived = FedTrainer(made).live(options.versions)
        began = time.monotonic()
        dying = FedTrainer(Path(folder) / "killed", options.seed, options.kills)
        found = dying.live(options.versions)
    told = ", ".join(f"{name} {count}" for name, count in dying.killed.most_common())
    equal = sum(found.get(version) == digest for version, digest in lived.items())
    print(f"{dying.killed.total()} kills in {time.monotonic() - began:.0f} s: {told}")
    print(
        f"{equal} of {len(lived)} versions have the weights of the trainer that lived, "
        f"{len(set(lived.values()))} different ones"
    )
    sys.exit(found != lived)


if __name__ == "__main__":
    main()
