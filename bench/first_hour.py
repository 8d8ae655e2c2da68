"""How long a stranger waits: the commands of docs/guide/deploy.md on this machine, and when each stage is reached.

    python -m bench.first_hour

A founder, a validator and a miner have a bucket each on a real S3 server on loopback, and windows of 5 seconds. Seconds
count from the first command. Typing, a cloud account and its credentials are not in them.
"""

import argparse
import tempfile
import time
from pathlib import Path

from tests.support.processes.deployment import follow_page, make_deployment


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print("| stage | seconds since the first command |\n|---|---:|")
    with tempfile.TemporaryDirectory() as directory, make_deployment(Path(directory)) as deployment:
        start = time.monotonic()
        follow_page(deployment, lambda stage: print(f"| {stage} | {time.monotonic() - start:.1f} |", flush=True))


if __name__ == "__main__":
    main()
