"""The families of models that this program computes, beside transformers (docs/guide/models.md).

    python -m bench.families

For each family a tiny checkpoint with random weights is written by transformers. The columns are the largest difference
of a logit from transformers' own: for whole sequences, for padded ones, and token by token with a cache.
"""

import tempfile
from pathlib import Path

from grailnode import UserError
from grailnode.engine.models import check_model
from tests.support.builders.families import FAMILIES, difference, write_family


def main() -> None:
    """Print the table in Markdown."""
    print("| `model_type` | whole | padded | cached |\n|---|---|---|---|")
    for name in sorted(FAMILIES):
        with tempfile.TemporaryDirectory() as directory:
            try:
                family = write_family(Path(directory), name)
                check_model(family.policy)
            except UserError as error:
                print(f"| {name} | refused: {error} | | |")
                continue
            values = [f"{difference(family, way):.0e}" for way in ("full", "padded", "cached")]
        print(f"| {name} | {' | '.join(values)} |", flush=True)


if __name__ == "__main__":
    main()
