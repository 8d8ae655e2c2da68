"""The plug-in of examples/webassembly: results of programs, and what hostile ones get."""

import re
from pathlib import Path
from types import ModuleType

import pytest

from grailnode.environments import contract
from grailnode.environments.registry import open_plugin
from tests.support.builders.plugins import example, install_example

pytest.importorskip("wasmtime", reason="the plug-in needs wasmtime, which `pip install '.[test]'` brings")


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    return example("webassembly")


def function(body: str, before: str = "") -> str:
    return f'(module {before} (func $run (export "run") {body}))'


def test_it_keeps_the_contract_and_answers_from_its_wheels_in_the_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(install_example("webassembly", tmp_path)))
    observations = []
    for hash_seed in (1, 2):
        plugin = open_plugin("webassembly", "{}", tmp_path / "wheels", hash_seed=hash_seed, strict=True)
        observations.append(contract.observe(plugin.environment, 40))
        episode = contract.begin(plugin.environment, plugin.environment.problem(bytes(32)), bytes(32))
        assert episode.step(function("(loop br 0)")) == "error: trap: out of fuel"
        assert episode.step(function("(result i32) i32.const 7")) == "7"
        plugin.environment.close()
    assert [line for line in contract.failures(*observations) if line[1]] == []
    assert {wheel.ref.distribution for wheel in plugin.wheels} == {"grailnode-webassembly", "wasmtime"}


def test_a_question_is_answered_with_a_program(plugin: ModuleType) -> None:
    environment = plugin.WebAssembly({})
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
def test_replies_have_results_or_a_bounded_error(plugin: ModuleType, text: str, reply: str) -> None:
    answer = plugin.run(text)
    assert answer.startswith(reply) and answer == plugin.run(text)
    assert len(answer) <= plugin.MOST_REPLY
