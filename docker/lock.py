"""Write a lock file, with the version and the digest of every package, from pip's report of what it would install.

On x86-64 Linux with the images' Python (3.11), in the repository:

    pip install --dry-run --ignore-installed --only-binary :all: --report report.json \\
        "torch==2.13.0+cpu" $(python docker/lock.py)
    python docker/lock.py report.json > docker/cpu.lock

and the same with "torch===2.13.0" (three signs: exactly this build) for docker/cuda.lock. Without an argument the
program prints the dependencies in pyproject.toml.
"""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parent.parent / "pyproject.toml"

_HEADER = "# Written by docker/lock.py, whose first lines say how to renew it. For x86-64 Linux and Python 3.11.\n"


def dependencies_of_project() -> list[str]:
    """Return the dependencies in pyproject.toml."""
    dependencies: list[str] = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    return dependencies


def lock_text(report: dict[str, Any]) -> str:
    """Return the text of a lock file, given pip's report."""
    lines = {}
    for item in report["install"]:
        name, version = item["metadata"]["name"].lower().replace("_", "-"), item["metadata"]["version"]
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        lines[name] = f"{name}=={version} --hash=sha256:{digest}\n"
    return _HEADER + "".join(lines[name] for name in sorted(lines))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.stdout.write(lock_text(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
    else:
        sys.stdout.write(" ".join(dependencies_of_project()) + "\n")
