"""Questions that a policy answers with a tool whose replies are exact: a search, a database, or a file system.

    pip install examples/tools
    grailnode environments try tools --environment-config '{"tool": "files"}' --answer 'cat a.txt'

The configuration may have `tool` and `turns`. A turn that begins with `answer ` ends the episode, and the tool gets
any other one. What the tools read is in this module, so the digest of its wheel pins it.

- `search`: the documents that fit some words best, by Okapi BM25 in integers.
- `sql`: a query of SQLite, as `{"tool": "sql", "sqlite": "3.40.1-ab12cd34"}`. Another version, or one that was built
  otherwise, may order rows, count steps or round numbers otherwise, so a node whose Python has another one cannot take
  part. The error of a wrong value says the right one.
- `files`: a file system in memory, with `ls`, `cat NAME`, `write NAME TEXT` and `rm NAME`.

Each limit counts steps, bytes or rows, and no reply depends on time, chance or the machine.
"""

import hashlib
import platform
import random
import re
import sqlite3
from collections import Counter
from typing import Any

MOST_REPLY = 1000  # characters
MOST_TURN = 1000  # characters
HELD_OUT = 64  # of 256 questions, by the first byte of the SHA-256 of their text

# the search

_TOWNS = tuple(
    a + b for a in ("Ar", "Bel", "Cor", "Dun", "El", "Fen", "Gal", "Hol") for b in ("by", "ford", "mouth", "stad")
)
_BUILDINGS = ("lighthouse", "town hall", "bridge", "mill", "museum", "library", "school", "theatre")
_facts = random.Random("grailnode-tools")
FACTS = {
    (town, building): (_facts.randrange(1500, 2000), _facts.randrange(10, 100))
    for town in _TOWNS
    for building in _BUILDINGS
}
"""The year and the height in metres of each building."""

DOCUMENTS = tuple(
    f"The {building} of {town} was built in {year}. It is {height} metres high."
    for (town, building), (year, height) in FACTS.items()
)
_words = re.compile(r"[a-z0-9]+")


class Search:
    """BM25 with k1 = 1.2 and b = 0.75 in integers, since logarithms of other machines may round otherwise."""

    def __init__(self) -> None:
        self.counts = [Counter(_words.findall(document.lower())) for document in DOCUMENTS]
        self.total = sum(count.total() for count in self.counts)
        self.documents = Counter(word for count in self.counts for word in count)

    def step(self, text: str) -> str:
        words = sorted(set(_words.findall(text.lower())) & self.documents.keys())
        scores = [(-sum(self._score(word, count) for word in words), place) for place, count in enumerate(self.counts)]
        return "\n".join(DOCUMENTS[place] for score, place in sorted(scores)[:3] if score) or "nothing found"

    def _score(self, word: str, count: Counter[str]) -> int:
        times, documents = count[word], len(self.counts)
        # 64 * log2(1 + (N - n + 1/2) / (n + 1/2)), rounded down, with N documents of which n have the word
        rarity = ((2 * documents + 2) ** 64 // (2 * self.documents[word] + 1) ** 64).bit_length() - 1
        # times * (k1 + 1) / (times + k1 * (1 - b + b * length / mean length)), in thousandths
        length = 10 * times * self.total + 3 * self.total + 9 * count.total() * documents
        return rarity * (22_000 * times * self.total // length)


# the database

CUSTOMERS = ("Ada", "Bo", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana")
ITEMS = ("apple", "bread", "candle", "drum", "eraser", "flute", "glue", "hammer")
_orders = random.Random("grailnode-tools orders")
ORDERS = tuple(
    (number, _orders.choice(CUSTOMERS), _orders.choice(ITEMS), _orders.randrange(50, 5000), _orders.randrange(1, 10))
    for number in range(1, 201)
)
MOST_STEPS = 100_000  # of SQLite's virtual machine, for a query
MOST_ROWS = 20
MOST_QUERY = 500  # characters
MOST_SELECTS = 3  # a query that names another one many times, which does so with a third, takes long to compile
MOST_COLUMNS = 25  # of a table or result; `SELECT *` of joins in joins multiplies them while a query is compiled
MOST_VALUE = 1000  # bytes, of a value while a query is computed: one step of the machine may read all of it
FUNCTIONS = frozenset(
    {"abs", "avg", "coalesce", "count", "group_concat", "ifnull", "length", "like", "lower"}
    | {"max", "min", "nullif", "round", "substr", "sum", "total", "upper"}
)
_selects = re.compile(r"select|values", re.IGNORECASE)
_query = re.compile(r"\s*(select|with|values)\b", re.IGNORECASE)


def sqlite_build() -> str:
    """Return the version of SQLite and a digest of how it was built, on which its replies depend."""
    database = sqlite3.connect(":memory:")
    rows = database.execute("SELECT sqlite_source_id() UNION ALL SELECT * FROM pragma_compile_options").fetchall()
    digest = hashlib.sha256(repr((platform.machine(), sorted(rows))).encode()).hexdigest()
    return f"{sqlite3.sqlite_version}-{digest[:8]}"


class Database:
    """A table in memory that can be read. Steps are counted by SQLite's progress handler."""

    def __init__(self) -> None:
        self.steps = 0
        self.database = sqlite3.connect(":memory:", isolation_level=None)
        self.database.execute("PRAGMA temp_store = MEMORY")
        self.database.execute(
            "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, item TEXT, cents INTEGER, quantity INTEGER)"
        )
        self.database.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?)", ORDERS)
        self.database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_VALUE)
        self.database.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, MOST_COLUMNS)
        self.database.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 50)
        self.database.set_authorizer(_authorize)
        self.database.set_progress_handler(self._count, 1000)

    def _count(self) -> bool:
        self.steps += 1000
        return self.steps >= MOST_STEPS

    def step(self, text: str) -> str:
        if not _query.match(text) or len(text) > MOST_QUERY or len(_selects.findall(text)) > MOST_SELECTS:
            return f"error: not one query of at most {MOST_QUERY} characters and {MOST_SELECTS} SELECT"
        self.steps = 0
        try:
            rows = self.database.execute(text).fetchmany(MOST_ROWS)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            return f"error: {error}"
        return "\n".join("|".join(map(_shown, row)) for row in rows) or "no rows"


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    is_read = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
    is_call = action == sqlite3.SQLITE_FUNCTION and second in FUNCTIONS
    return sqlite3.SQLITE_OK if is_read or is_call else sqlite3.SQLITE_DENY


def _shown(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else "NULL" if value is None else str(value)


# the file system

MOST_FILES = 16


class Files:
    """Files in memory by name."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = dict(files)

    def step(self, text: str) -> str:
        command, name, *rest = [*text.split(maxsplit=2), "", ""]
        if command == "ls":
            return "\n".join(sorted(self.files)) or "no files"
        if command == "write" and name and (name in self.files or len(self.files) < MOST_FILES):
            self.files[name] = rest[0]
            return "written"
        if command in ("cat", "rm") and name in self.files:
            return self.files[name] if command == "cat" else f"removed {self.files.pop(name)!r}"
        return "error: no such command or file, or too many files"


# questions, and episodes

_ASK = " Each turn is {}, or `answer ` and the answer."


def _search_question(rng: random.Random) -> tuple[str, Any]:
    (town, building), (year, height) = rng.choice(list(FACTS.items()))
    question, answer = rng.choice([("How many metres high is", height), ("In which year was built", year)])
    return f"{question} the {building} of {town}?" + _ASK.format("words to search for"), str(answer)


def _sql_question(rng: random.Random) -> tuple[str, Any]:
    customer, item, least = rng.choice(CUSTOMERS), rng.choice(ITEMS), rng.randrange(500, 4500, 10)
    own = [order for order in ORDERS if order[1] == customer]
    question, answer = rng.choice(
        [
            (f"How many orders of {customer} cost more than {least} cents?", sum(order[3] > least for order in own)),
            (
                f"How many of the item {item} did all orders of more than {least} cents have together?",
                sum(order[4] for order in ORDERS if order[2] == item and order[3] > least),
            ),
        ]
    )
    table = " The table is orders(id, customer, item, cents, quantity)."
    return question + table + _ASK.format("a query of SQLite"), str(answer)


def _files_question(rng: random.Random) -> tuple[str, Any]:
    files = {f"{name}.txt": str(rng.randrange(10, 100)) for name in rng.sample("abcdefgh", 3)}
    question = "Write the sum of the numbers in all files to the file sum.txt, and then answer done."
    return f"{question} The files are {' '.join(files)}." + _ASK.format(
        "ls, cat NAME, write NAME TEXT or rm NAME"
    ), files


_QUESTIONS = {"search": _search_question, "sql": _sql_question, "files": _files_question}


class Tools:
    """Questions for one of the tools."""

    exact = True
    held_out_size = None

    def __init__(self, config: dict[str, Any]) -> None:
        self.tool, self.turns = config.get("tool", "search"), config.get("turns", 6)
        if self.tool not in _QUESTIONS:
            raise ValueError(f"tool {self.tool!r}: none of {', '.join(_QUESTIONS)}")
        if self.tool == "sql" and config.get("sqlite") != (build := sqlite_build()):
            raise ValueError(f'this Python has SQLite {build}, which the run must name as "sqlite"')
        self.search = Search()

    def problem(self, seed: bytes) -> dict[str, Any]:
        return self._draw(random.Random(b"training" + seed), False)

    def held_out_problem(self, index: int) -> dict[str, Any]:
        return self._draw(random.Random(b"held-out %d" % index), True)

    def _draw(self, rng: random.Random, held_out: bool) -> dict[str, Any]:
        while True:
            prompt, reference = _QUESTIONS[self.tool](rng)
            if (hashlib.sha256(prompt.encode()).digest()[0] < HELD_OUT) == held_out:
                return {"prompt": prompt, "reference": reference}

    def begin(self, problem: dict[str, Any], seed: bytes) -> "Episode":
        reference = problem["reference"]
        if self.tool == "files":
            return Episode(Files(reference), str(sum(map(int, reference.values()))))
        return Episode(self.search if self.tool == "search" else Database(), reference)


class Episode:
    """One episode. The reward is 1 for the right answer, or for the right file."""

    def __init__(self, tool: Search | Database | Files, right: str) -> None:
        self.tool, self.right, self.result = tool, right, ""

    def step(self, text: str) -> str | None:
        text = text.strip()
        if text.startswith("answer "):
            self.result = text.removeprefix("answer ").strip()
            return None
        return self.tool.step(text[:MOST_TURN])[:MOST_REPLY]

    def reward(self) -> float:
        result = self.tool.files.get("sum.txt", "") if isinstance(self.tool, Files) else self.result
        return 1.0 if result == self.right else 0.0
