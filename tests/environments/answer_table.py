"""The table of answers with the verdicts that are due: `python -m tests.environments.answer_table` writes beside each
what math-verify says of it.

Here math-verify has a time limit, an alarm in a main thread, which hostile answers need; in the tests it has none.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TABLE: Final = Path(__file__).with_name("answer_table.txt")
_ROW: Final = re.compile(r"^    ([=!])(~?) (.*)$")


@dataclass(frozen=True)
class Row:
    """One pair of answers.

    Attributes:
        section: the rule that decides, and why math-verify may differ.
        same: the verdict that is due.
        library_agrees: whether math-verify says so too.
    """

    section: str
    gold: str
    answer: str
    same: bool
    library_agrees: bool


def rows(text: str) -> list[Row]:
    result, section, gold = [], "", ""
    for line in text.splitlines():
        match = _ROW.match(line)
        if match:
            result.append(Row(section, gold, match[3], match[1] == "=", not match[2]))
        elif line.startswith("## "):
            section = line[3:]
        elif line and not line.startswith("#"):
            gold = line
    return result


def library_verdict(gold: str, answer: str, seconds: int | None = None) -> bool:
    """What math-verify says; with a limit of `seconds` for each parse it says no where the time is up."""
    import math_verify

    first, second = (math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=seconds) for text in (gold, answer))
    return bool(math_verify.verify(first, second, timeout_seconds=seconds))


def main() -> None:
    """Write the verdicts of math-verify into the table, and print how often it differs, by section."""
    gold, lines = "", []
    for line in TABLE.read_text().splitlines():
        match = _ROW.match(line)
        if match:
            differs = library_verdict(gold, match[3], seconds=5) != (match[1] == "=")
            lines.append(f"    {match[1]}{'~' * differs} {match[3]}")
            continue
        if line and not line.startswith("#"):
            gold = line
        lines.append(line)
    TABLE.write_text("\n".join(lines) + "\n")
    table = rows(TABLE.read_text())
    for section in dict.fromkeys(row.section for row in table):
        own = [row for row in table if row.section == section]
        print(f"{sum(not row.library_agrees for row in own):4} of {len(own):3}  {section.partition(':')[0]}")
    print(f"{sum(not row.library_agrees for row in table):4} of {len(table):3}  all")


if __name__ == "__main__":
    main()
