"""Reads the Dockerfiles of this repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"

Instruction = tuple[str, str]


def instructions(file: Path) -> list[Instruction]:
    """Return the instructions of a Dockerfile in order, without comments, with continued lines joined."""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    parts = (line.partition(" ") for line in text.split("\n") if line)
    return [(verb.upper(), rest.strip()) for verb, _, rest in parts]
