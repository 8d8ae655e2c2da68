"""How long a stranger waits for each stage of docs/guide/{founder,validator,miner}.md, carried out on this machine.

    python -m bench.first_hour

A founder, a validator and a miner have a bucket each on a real S3 server on loopback, and windows of 5 seconds. Seconds
count from the first command. Typing, a cloud account and its credentials are not in them.
"""

import argparse
import tempfile
import time
from pathlib import Path

from tests.support.processes.deployment import follow_pages, make_deployment


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print("| stage | seconds since the first command |\n|---|---:|")
    with tempfile.TemporaryDirectory() as directory, make_deployment(Path(directory)) as deployment:
        start = time.monotonic()
        follow_pages(deployment, lambda stage: print(f"| {stage} | {time.monotonic() - start:.1f} |", flush=True))


if __name__ == "__main__":
    main()
