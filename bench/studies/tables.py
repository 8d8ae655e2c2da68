"""Tables of the studies, as the pages of docs/benchmarks have them."""

from collections.abc import Iterable, Sequence


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table in Markdown, under its title."""
    print(f"\n{title}\n")
    print(f"| {' | '.join(header)} |")
    print("|" + "---|" * len(header))
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def rate_text(rate: float) -> str:
    """Return a learning rate of one digit, like 3e-6."""
    return f"{rate:.0e}".replace("e-0", "e-")


def percent(share: float) -> str:
    """Return a share with three digits that count."""
    return f"{100 * share:#.3g}%".replace(".%", "%")
