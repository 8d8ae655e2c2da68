"""How long a stranger waits for each stage of docs/guide/{founder,validator,miner}.md, carried out on this machine.

    python -m bench.first_hour

A founder, a validator and a miner have a bucket each on a real S3 server on loopback, and windows of 5 seconds. Seconds
count from the first command. Typing, a cloud account and its credentials are not in them. The last line has the longest
step of a task, in seconds of the processor, of each process that held its event loop for more than 20 ms.
"""

import argparse
import tempfile
import time
from pathlib import Path

from tests.support.processes.deployment import follow_pages, make_deployment
from tests.support.processes.programs import logged_events


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print("| stage | seconds since the first command |\n|---|---:|")
    with tempfile.TemporaryDirectory() as directory, make_deployment(Path(directory)) as deployment:
        start = time.monotonic()
        follow_pages(deployment, lambda stage: print(f"| {stage} | {time.monotonic() - start:.1f} |", flush=True))
        logs = sorted(Path(directory).glob("**/logs/*.jsonl"))
        steps = {log.stem: [event["seconds"] for event in logged_events(log, "event-loop-blocked")] for log in logs}
        longest = ", ".join(f"{name} {max(seconds):g}" for name, seconds in steps.items() if seconds)
        print(f"steps above 20 ms in {len(logs)} processes: {longest or 'none'}")


if __name__ == "__main__":
    main()
