"""The plug-ins of examples/tools and examples/webassembly: replies of a search, a database, a file system and programs,
and what hostile turns get.
"""

import json
import math
import re
import sqlite3
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from grailnode.environments import contract
from grailnode.environments.registry import open_plugin
from tests.support.builders.plugins import example, install_example
from tests.support.pytest_options.few_daily import few_daily

TOOLS = ("sql", "search", "files")


@pytest.fixture(scope="module")
def tools() -> ModuleType:
    return example("tools")


def config_of(tools: ModuleType, tool: str) -> dict[str, str]:
    return {"tool": tool, **({"sqlite": tools.sqlite_build()} if tool == "sql" else {})}


def begin(tools: ModuleType, tool: str) -> tuple[str, Any]:
    """Return the question of a problem of a tool, and its episode."""
    environment = tools.Tools(config_of(tools, tool))
    problem = environment.problem(bytes(32))
    return problem["prompt"], environment.begin(problem, bytes(32))


@pytest.mark.parametrize("tool", [*few_daily(TOOLS, 3), "webassembly"])
def test_a_tool_keeps_the_contract_from_its_wheel_in_the_sandbox(
    request: pytest.FixtureRequest, tools: ModuleType, tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "webassembly" if tool == "webassembly" else "tools"
    if name == "webassembly":
        request.getfixturevalue("wasm")
    config = json.dumps({} if name == "webassembly" else config_of(tools, tool))
    monkeypatch.syspath_prepend(str(install_example(name, tmp_path)))
    observations = []
    for hash_seed in (1, 2):
        plugin = open_plugin(name, config, tmp_path / "wheels", hash_seed=hash_seed, strict=True)
        observations.append(contract.observe(plugin.environment, 40))
        if name == "webassembly":
            episode = contract.begin(plugin.environment, plugin.environment.problem(bytes(32)), bytes(32))
            assert episode.step(function("(loop br 0)")) == "error: trap: out of fuel"
            assert episode.step(function("(result i32) i32.const 7")) == "7"
            assert {wheel.ref.distribution for wheel in plugin.wheels} == {"grailnode-webassembly", "wasmtime"}
        plugin.environment.close()
    assert [line for line in contract.failures(*observations) if line[1]] == []


def test_questions_are_answered_with_the_tools(tools: ModuleType) -> None:
    prompt, episode = begin(tools, "search")
    first = episode.step(prompt.partition("?")[0]).splitlines()[0]
    year, height = (word.strip(".") for word in first.split() if word.strip(".").isdigit())
    assert episode.step(f"answer {year if 'year' in prompt else height}") is None
    assert episode.reward() == 1.0

    prompt, episode = begin(tools, "files")
    values = [int(episode.step(f"cat {name}")) for name in episode.step("ls").splitlines()]
    assert episode.step(f"write sum.txt {sum(values)}") == "written"
    assert episode.step("answer done") is None
    assert episode.reward() == 1.0

    _, episode = begin(tools, "sql")
    assert episode.step("SELECT count(*), max(id) FROM orders WHERE cents > 0") == "200|200"
    assert episode.step("WITH top AS (SELECT id FROM orders ORDER BY cents DESC) SELECT count(*) FROM top") == "200"
    assert episode.step(f"answer {episode.right}") is None
    assert episode.reward() == 1.0


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
NESTED = f"WITH a AS (SELECT 1 FROM {','.join(['orders'] * 25)}), b AS (SELECT 1 FROM {','.join(['a'] * 60)}) "
JOINED = f"WITH a AS (SELECT * FROM {','.join(['orders'] * 20)}), b AS (SELECT * FROM {','.join(['a'] * 19)}) "
QUERIES = {
    ENDLESS: "interrupted",
    NESTED + f"SELECT 1 FROM {','.join(['b'] * 50)}": "too many references",
    JOINED + f"SELECT 1 FROM {','.join(['b'] * 60)}": "too many columns",
    "WITH RECURSIVE c(x) AS (SELECT 'a' UNION ALL SELECT x || x FROM c) SELECT length(x) FROM c": "too big",
    "SELECT group_concat(a.customer) FROM orders a, orders b": "error: ",
    "SELECT zeroblob(1000000000)": "not authorized",
    "SELECT printf('%.*c', 1000000000, 'x')": "not authorized",
    "SELECT random()": "not authorized",
    "SELECT date('now')": "not authorized",
    "SELECT CURRENT_TIMESTAMP": "not authorized",
    "SELECT load_extension('/lib/x.so')": "not authorized",
    "SELECT sqlite_source_id()": "not authorized",
    "SELECT * FROM pragma_database_list": "not authorized",
    "SELECT * FROM json_each('[1]')": "error: ",
    "ATTACH '/tmp/x' AS x": "not one query",
    "PRAGMA writable_schema = 1": "not one query",
    "VACUUM INTO '/tmp/x'": "not one query",
    "EXPLAIN SELECT 1": "not one query",
    "DROP TABLE orders": "not one query",
    "WITH a AS (SELECT 1) DELETE FROM orders": "not authorized",
    "SELECT 1; DROP TABLE orders": "one statement",
    "SELECT '\0'": "error: ",
    "SELECT '\ud800'": "error: ",
    "SELECT " + "(" * 200 + "1" + ")" * 200: "error: ",
}


@pytest.mark.parametrize(("query", "reply"), QUERIES.items(), ids=lambda text: text[:20])
def test_a_hostile_query_gets_an_error_and_changes_nothing(tools: ModuleType, query: str, reply: str) -> None:
    _, episode = begin(tools, "sql")
    answer = episode.step(query)
    assert answer.startswith("error: ") and reply in answer
    assert episode.tool.steps <= tools.MOST_STEPS
    assert episode.step("SELECT count(*) FROM orders") == "200"


def test_replies_are_bounded(tools: ModuleType) -> None:
    _, episode = begin(tools, "sql")
    assert len(episode.step("SELECT a.id FROM orders a, orders b").splitlines()) == tools.MOST_ROWS
    assert len(episode.step("SELECT " + ",".join(["substr('" + "x" * 60 + "', 1)"] * 5))) <= tools.MOST_REPLY
    _, episode = begin(tools, "files")
    assert episode.step("write").startswith("error: ")
    replies = [episode.step(f"write {number} {'x' * 5000}") for number in range(30)]
    assert replies.count("written") == tools.MOST_FILES - 3
    assert max(map(len, episode.tool.files.values())) <= tools.MOST_TURN


@pytest.mark.parametrize("build", ["3.0.0", sqlite3.sqlite_version, f"{sqlite3.sqlite_version}-00000000"])
def test_another_sqlite_or_another_build_of_it_cannot_take_part(tools: ModuleType, build: str) -> None:
    with pytest.raises(ValueError, match=f"this Python has SQLite {sqlite3.sqlite_version}-"):
        tools.Tools({"tool": "sql", "sqlite": build})


def test_the_search_orders_documents_as_bm25_in_floating_point_does(tools: ModuleType) -> None:
    search, count = tools.Search(), len(tools.DOCUMENTS)
    mean = search.total / count

    def score(words: set[str], place: int) -> float:
        own = search.counts[place]
        parts: list[float] = [
            math.log2(1 + (count - search.documents[word] + 0.5) / (search.documents[word] + 0.5))
            * (own[word] * 2.2 / (own[word] + 1.2 * (0.25 + 0.75 * own.total() / mean)))
            for word in words
        ]
        return sum(parts)

    for query in ("lighthouse of Belford", "mill 1700", "town hall Arby height", "the library"):
        words = set(query.lower().split()) & search.documents.keys()
        best = max(range(count), key=lambda place: (score(words, place), -place))
        assert score(words, tools.DOCUMENTS.index(search.step(query).splitlines()[0])) == pytest.approx(
            score(words, best), rel=0.01
        )
    assert search.step("zzz") == search.step("") == "nothing found"


# The plug-in of examples/webassembly: results of programs, and what hostile ones get


@pytest.fixture(scope="module")
def wasm() -> ModuleType:
    pytest.importorskip("wasmtime", reason="the plug-in needs wasmtime, which `pip install '.[test]'` brings")
    return example("webassembly")


def function(body: str, before: str = "") -> str:
    return f'(module {before} (func $run (export "run") {body}))'


def test_a_question_is_answered_with_a_program(wasm: ModuleType) -> None:
    environment = wasm.WebAssembly({})
    problem = environment.problem(bytes(32))
    x, steps, factor, addend, modulus = re.findall(r"\d+", problem["prompt"])
    episode = environment.begin(problem, bytes(32))
    total = f"(i32.add (i32.mul (local.get $x) (i32.const {factor})) (i32.const {addend}))"
    step = f"(local.set $x (i32.rem_u {total} (i32.const {modulus})))"
    count = "(local.tee $n (i32.sub (local.get $n) (i32.const 1)))"
    start = f"(local.set $x (i32.const {x})) (local.set $n (i32.const {steps}))"
    loop = f"(loop {step} (br_if 0 {count}))"
    result = episode.step(function(f"(result i32) (local $x i32) (local $n i32) {start} {loop} (local.get $x)"))
    assert episode.step(f"answer {result}") is None
    assert episode.reward() == 1.0


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        (function("(result i32 i64) i32.const -1 i64.const -1"), "-1 -1"),
        (function("(result f64) (f64.neg (f64.div (f64.const 0) (f64.const 0)))"), "nan"),
        (function("(result i32) (memory.grow (i32.const 15))", "(memory 1)"), "1"),
        (function("(result i32) (memory.grow (i32.const 16))", "(memory 1)"), "-1"),
        (function("(loop br 0)"), "error: trap: out of fuel"),
        (function("(loop br 0)", "(start $run)"), "error: trap: out of fuel"),
        (function("(loop (drop (memory.grow (i32.const 1))) br 0)", "(memory 1)"), "error: trap: out of fuel"),
        (function("call $run"), "error: trap: stack overflow"),
        (function("unreachable"), "error: trap: unreachable"),
        (function("", "(memory 65536)"), "error: memory minimum size of 65536 pages exceeds memory limits"),
        (function("", "(table 100000000 funcref)"), "error: table minimum size of 100000000 elements exceeds"),
        (function("", '(memory 1) (data (i32.const 65535) "aa")'), "error: trap: memory out of bounds"),
        (function("", f'(memory 1) (data (i32.const 0) "{"a" * 2000}")'), "error: no text"),
        (function("(memory.fill (i32.const 0) (i32.const 0) (i32.const 9))", "(memory 1)"), "error: Invalid input"),
        (function("(result i32) i64.const 1"), "error: Invalid input"),
        (function("(drop (v128.const i64x2 0 0))"), "error: Invalid input"),
        (function("", '(import "a" "b" (func))'), "error: the module imports something"),
        (function("(param i32)"), "error: no function without parameters"),
        ('(module (global (export "run") i32 (i32.const 1)))', "error: no function without parameters"),
        ('(module binary "\\00asm")', "error: no text"),
        ("\0asm\1\0\0\0", "error: no text"),
        ("(component)", "error: no text"),
        ("(module " + "(" * 1900, "error: expected"),
        ("(module \0)", "error: unexpected character"),
        ("(module \ud800)", "error: "),
    ],
    ids=lambda text: ascii(text)[:40],
)
def test_replies_have_results_or_a_bounded_error(wasm: ModuleType, text: str, reply: str) -> None:
    answer = wasm.run(text)
    assert answer.startswith(reply) and answer == wasm.run(text)
    assert len(answer) <= wasm.MOST_REPLY
