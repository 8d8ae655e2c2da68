"""Questions that a policy answers with programs in WebAssembly, which wasmtime runs with exact replies.

    pip install examples/webassembly
    grailnode environments try webassembly --answer '(module (func (export "run") (result i32) i32.const 7))'

A turn that begins with `answer ` ends the episode. Any other one is a module in WebAssembly's text format: its exported
function `run`, without parameters, is called once, and the reply has its results, or an error. Modules import nothing.

Programs run in Pulley, wasmtime's interpreter for code that is compiled for no particular processor, so that the stack
of a recursion ends at the same depth everywhere. Fuel, memory, table and stack are bounded, NaN has one form, and what
one instruction may do is small: bulk memory, SIMD, threads, references and exceptions are off. A run pins the wheel of
wasmtime, as each wheel that the plug-in requires. Errors of a trap show only its kind: wasmtime's own text has names
of functions that differ from call to call.
"""

import hashlib
import random
from typing import Any

from wasmtime import Config, Engine, Func, Instance, Module, Store, Trap, WasmtimeError

MOST_TURN = 2000  # characters
MOST_REPLY = 200  # characters
MOST_FUEL = 1_000_000  # about as many instructions
MOST_MEMORY = 16 << 16  # bytes: 16 pages
MOST_ELEMENTS = 1000  # of a table
MOST_STACK = 256 << 10  # bytes
HELD_OUT = 64  # of 256 questions, by the first byte of the SHA-256 of their text
OFF = (
    *("parallel_compilation", "signals_based_traps", "memory_init_cow", "gc_support"),
    *("wasm_bulk_memory", "wasm_component_model", "wasm_custom_page_sizes", "wasm_exceptions", "wasm_gc"),
    *("wasm_function_references", "wasm_memory64", "wasm_multi_memory", "wasm_relaxed_simd"),
    *("wasm_simd", "wasm_stack_switching", "wasm_tail_call", "wasm_threads", "wasm_wide_arithmetic"),
)


def _engine() -> Engine:
    config = Config()
    config.target = "pulley64"
    config.consume_fuel = config.cranelift_nan_canonicalization = True
    config.max_wasm_stack = MOST_STACK
    config.memory_reservation = config.memory_guard_size = config.memory_reservation_for_growth = 0
    for option in OFF:
        setattr(config, option, False)
    return Engine(config)


ENGINE = _engine()


def run(text: str) -> str:
    """Return the results of a module's function `run`, separated by spaces, or `error: ` and why there are none."""
    if not text.startswith("(module") or "binary" in text or len(text) > MOST_TURN:
        return f"error: no text `(module ...` of at most {MOST_TURN} characters, without `binary`"
    store = Store(ENGINE)
    store.set_fuel(MOST_FUEL)
    store.set_limits(MOST_MEMORY, MOST_ELEMENTS, instances=1, tables=1, memories=1)
    try:
        module = Module(ENGINE, text)
        if module.imports:
            return "error: the module imports something"
        function = Instance(store, module, []).exports(store).get("run")
        if not isinstance(function, Func) or function.type(store).params:
            return 'error: no function without parameters is exported as "run"'
        result = function(store)
    except Trap as trap:
        return f"error: trap: {trap.trap_code.name.lower().replace('_', ' ')}"
    except (WasmtimeError, ValueError) as error:
        first, *_, last = f"{error}\n".strip().split("\n") * 2
        cause = last.lstrip(" 0123456789:") if "Caused by:" in str(error) else first
        return f"error: {cause}"[:MOST_REPLY]
    values = [] if result is None else result if isinstance(result, list) else [result]
    return " ".join(map(str, values))[:MOST_REPLY] or "no result"


class WebAssembly:
    """Questions that take many steps of arithmetic."""

    exact = True
    held_out_size = None

    def __init__(self, config: dict[str, Any]) -> None:
        self.turns = config.get("turns", 4)
        run("(module)")  # what the first module initializes is shared with all forks

    def problem(self, seed: bytes) -> dict[str, Any]:
        return self._draw(random.Random(b"training" + seed), False)

    def held_out_problem(self, index: int) -> dict[str, Any]:
        return self._draw(random.Random(b"held-out %d" % index), True)

    def _draw(self, rng: random.Random, held_out: bool) -> dict[str, Any]:
        while True:
            x, factor, addend, modulus = (rng.randrange(10, 1000) for _ in range(4))
            steps = rng.randrange(10, 1000)
            prompt = (
                f"Begin with x = {x}, and replace x {steps} times by the remainder of x * {factor} + {addend} divided "
                f"by {modulus}. What is x? Each turn is a module in WebAssembly's text format that exports a function "
                '"run" without parameters, whose results you get, or `answer ` and the answer.'
            )
            if (hashlib.sha256(prompt.encode()).digest()[0] < HELD_OUT) == held_out:
                for _ in range(steps):
                    x = (x * factor + addend) % modulus
                return {"prompt": prompt, "reference": str(x)}

    def begin(self, problem: dict[str, Any], seed: bytes) -> "Episode":
        return Episode(problem["reference"])


class Episode:
    """One episode. The reward is 1 for the right answer."""

    def __init__(self, right: str) -> None:
        self.right, self.result = right, ""

    def step(self, text: str) -> str | None:
        text = text.strip()
        if text.startswith("answer "):
            self.result = text.removeprefix("answer ").strip()
            return None
        return run(text)

    def reward(self) -> float:
        return 1.0 if self.result == self.right else 0.0
