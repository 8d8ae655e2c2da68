"""Turn pip's report of what it would install into a lock file: every version, and the digest of the very file.

On x86-64 Linux with the images' Python (3.11), in the repository:

    pip install --dry-run --ignore-installed --only-binary :all: --report report.json "torch==2.13.0+cpu" $(python
    docker/lock.py) python docker/lock.py report.json > docker/cpu.lock

and the same with "torch===2.13.0" (three signs: that build and no other) for docker/cuda.lock. Without an argument it
prints what pyproject.toml asks for.
"""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parent.parent / "pyproject.toml"

_HEAD = "# Written by docker/lock.py, whose first lines say how to renew it. For x86-64 Linux and Python 3.11.\n"


def wanted() -> list[str]:
    """The project's dependencies, as pyproject.toml has them."""
    dependencies: list[str] = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    return dependencies


def locked(report: dict[str, Any]) -> str:
    """A lock file's text from pip's report."""
    lines = {}
    for item in report["install"]:
        name, version = item["metadata"]["name"].lower().replace("_", "-"), item["metadata"]["version"]
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        lines[name] = f"{name}=={version} --hash=sha256:{digest}\n"
    return _HEAD + "".join(lines[name] for name in sorted(lines))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.stdout.write(locked(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
    else:
        sys.stdout.write(" ".join(wanted()) + "\n")
