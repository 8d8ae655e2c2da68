"""Weights after kill -9 of a trainer's real processes, compared bit for bit: `python -m bench.crash_bits --kills 100`.

A trainer (supervisor, training, upload, download, beacon) runs twice and gets the same groups each time, the next ones
when the version before is published: once undisturbed, and once while its processes are killed at random times. The
command prints the kills by process and in how many versions both runs have the same weights, and exits with 1 if any
differ. With the defaults it takes about 6 minutes on two cores; it needs nothing but the installed program.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.support.processes.stepwise_trainer import StepwiseTrainer, make_run


def main() -> None:
    """Run the trainer twice, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="how many processes are killed")
    parser.add_argument("--versions", type=int, default=40, help="how many versions each run publishes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the times of the kills")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="grailnode-bits-") as folder:
        directory = make_run(Path(folder) / "undisturbed")
        shutil.copytree(directory, Path(folder) / "killed")
        expected_digests = StepwiseTrainer(directory).publish_versions(arguments.versions)
        start_time = time.monotonic()
        trainer = StepwiseTrainer(Path(folder) / "killed", arguments.seed, arguments.kills)
        digests = trainer.publish_versions(arguments.versions)
    counts = ", ".join(f"{name} {count}" for name, count in trainer.kill_counts.most_common())
    equal_count = sum(digests.get(version) == digest for version, digest in expected_digests.items())
    print(f"{trainer.kill_counts.total()} kills in {time.monotonic() - start_time:.0f} s: {counts}")
    print(
        f"{equal_count} of {len(expected_digests)} versions have the weights of the undisturbed trainer; "
        f"{len(set(expected_digests.values()))} of these weights are different"
    )
    sys.exit(digests != expected_digests)


if __name__ == "__main__":
    main()
