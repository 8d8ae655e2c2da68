"""The layout of the packages: imports run grailnode -> roles -> protocol and down ROOMS; protocol touches nothing
outside itself; tests and benches share code through tests/support only.
"""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("protocol", "roles", "grailnode")
TESTS_AND_BENCHES = sorted(path for folder in ("tests", "bench") for path in (ROOT / folder).rglob("*.py"))
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
PURE = [path for path in FILES if path.is_relative_to(ROOT / "protocol")]

FORBIDDEN_IMPORTS = {  # importer (a prefix of the module's name): what it may not import
    "protocol": ("roles", "grailnode"),
    "roles": ("grailnode",),
    "roles.miner": ("roles.validator", "roles.trainer"),
    "roles.validator": ("roles.miner", "roles.trainer"),
    "roles.trainer": ("roles.miner", "roles.validator"),
}
WORLD = {  # what pure code has no business with: files, clocks, networks, processes, ambient randomness, event loops
    *("os", "io", "pathlib", "shutil", "tempfile", "glob", "mmap"),
    *("time", "datetime", "sched"),
    *("random", "secrets", "uuid"),
    *("socket", "ssl", "http", "urllib", "httpx", "requests", "boto3", "botocore"),
    *("subprocess", "multiprocessing", "signal", "sys"),
    *("trio", "asyncio", "anyio", "logging"),
}
ROOMS = {  # rooms of each package in the order in which they may import: a room imports only rooms that stand before it
    "protocol": (
        *("errors", "limits", "encoding", "bounded_json", "compression", "digest", "paths", "proof", "window"),
        *("kernels", "beacon", "identity", "environments", "rollout", "difficulty", "patch", "pseudogradient"),
        *("objects", "lora", "quantization", "run", "chain", "outer", "judging"),
    ),
    "roles": (
        *("settings_base", "ports", "gather", "node", "records", "authority_updates"),
        *("participants", "rosters", "policy", "miner", "validator", "trainer"),
    ),
    "roles.trainer": (
        *("tensor_shards", "verified_batch", "spool", "training_spool", "learn"),
        *("publish", "collect", "outer"),
    ),
    "grailnode": (
        *("store", "beacon", "engine", "config", "chat", "sandbox", "environments", "convert", "observe"),
        *("calibration", "track", "run", "ui", "ranks", "node", "library", "demo", "cli", "__main__"),
    ),
}
SEPARATE = {  # rooms that do not import each other at all
    "roles.trainer": ("learn", "publish", "collect", "outer")
}
VAGUE = {"utils", "util", "common", "helpers", "helper", "shared", "manager", "misc"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> list[tuple[str, int]]:
    """Return every module that a file imports, absolute or not, at any depth: (name, level)."""
    found: list[tuple[str, int]] = []
    pending: list[ast.AST] = [tree(path)]
    while pending:
        node = pending.pop()  # an expression contains no import
        pending += (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
        if isinstance(node, ast.Import):
            found += [(alias.name, 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [
                (node.module or "", node.level),
                *((f"{node.module}.{alias.name}", node.level) for alias in node.names),
            ]
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_there_is_something_to_look_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(PACKAGES)


def all_imports(files: Iterable[Path]) -> Iterator[tuple[str, str, int]]:
    """(module, what it imports, level) for each import of some files."""
    return ((module_name(path), target, level) for path in files for target, level in imports(path))


def test_imports_run_one_way() -> None:
    assert not [
        (name, target)
        for name, target, _ in all_imports(FILES)
        for inner, outers in FORBIDDEN_IMPORTS.items()
        if within(name, inner) and any(within(target, outer) for outer in outers)
    ]


def test_imports_are_absolute() -> None:
    assert not [(name, target) for name, target, level in all_imports(FILES) if level]


def test_protocol_is_pure() -> None:
    assert not [(name, target) for name, target, _ in all_imports(PURE) if target.split(".")[0] in WORLD]


def test_protocol_opens_no_file() -> None:
    calls = [(path, node.func) for path in PURE for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
    names = {(module_name(path), call.id) for path, call in calls if isinstance(call, ast.Name)}
    assert not [(name, call) for name, call in names if call in {"open", "input", "print", "exec", "eval"}]


def test_names_say_what_a_module_does() -> None:
    assert not [name for name in map(module_name, FILES) if VAGUE & set(name.split("."))]


def room(name: str, package: str) -> str:
    """Return the room of a module inside a package; empty for the package itself and for what lies elsewhere."""
    return name.removeprefix(f"{package}.").split(".")[0] if name.startswith(f"{package}.") else ""


def arrows(package: str) -> Iterator[tuple[str, str, str]]:
    """(module, its room, the room that it imports) for each import between two rooms of a package."""
    names = {module_name(path) for path in FILES}
    for path in FILES:
        name = module_name(path)
        for target, _ in imports(path):
            inner, outer = room(name, package), room(target, package)
            if inner and outer and inner != outer and f"{package}.{outer}" in names:
                yield name, inner, outer


def test_no_imports_form_a_circle() -> None:
    """Imports inside functions count: they may save time at the start of a process, but hide no circle."""
    names = {module_name(path) for path in FILES}
    graph: dict[str, set[str]] = {}
    for path in FILES:
        found = {target for target, _ in imports(path)} & names
        graph[module_name(path)] = {name for name in found if not any(within(other, name) for other in found - {name})}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("package", ROOMS)
def test_every_room_has_its_place(package: str) -> None:
    rooms = {room(module_name(path), package) for path in FILES} - {""}
    assert rooms == set(ROOMS[package])


@pytest.mark.parametrize("package", ROOMS)
def test_a_room_imports_only_rooms_before_it(package: str) -> None:
    place = {name: number for number, name in enumerate(ROOMS[package])}
    assert not [arrow for arrow in arrows(package) if place[arrow[2]] > place[arrow[1]]]


@pytest.mark.parametrize("package", SEPARATE)
def test_separate_rooms_do_not_import_each_other(package: str) -> None:
    rooms = set(SEPARATE[package])
    assert not [arrow for arrow in arrows(package) if {arrow[1], arrow[2]} <= rooms]


def test_grailnode_has_one_flat_module() -> None:
    flat = {path.name for path in (ROOT / "grailnode").glob("*.py")}
    assert flat == {"__init__.py", "__main__.py", "config.py"}


def test_every_folder_says_what_it_is_for() -> None:
    silent = [path for path in FILES if path.name == "__init__.py" and not ast.get_docstring(tree(path))]
    assert not silent


def test_two_rooms_never_share_a_file_name() -> None:
    names = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert not [name for name, count in names.items() if count > 1]


def test_the_product_imports_no_test() -> None:
    assert not [(name, target) for name, target, _ in all_imports(FILES) if target.split(".")[0] in ("tests", "bench")]


OPENERS = {"open_signed", "open_announced"}
MAY_OPEN = {  # the modules outside of protocol/ that check signatures themselves, and why
    "roles.records",  # the one door for other participants' records
    "roles.trainer.publish.fencing",  # any head under its own key counts, one of another run too
    "roles.trainer.publish.history",  # its own manifests, in its own state
    "grailnode.run.creation",  # the run manifest, from which everything else is checked
    "grailnode.store.decorators.routed",  # it finds the stores that the door reads from
    "grailnode.store.decorators.mirrored",  # it asks the origin where a mirror's answer is not what was signed
}


def test_signed_records_come_in_through_one_door() -> None:
    openers = {
        module_name(path)
        for path in FILES
        if not within(module_name(path), "protocol")
        and OPENERS & {target.rpartition(".")[2] for target, _ in imports(path)}
    }
    assert openers == MAY_OPEN


MAY_COMPARE_DIGESTS = {  # beside `roles.records.fetch_object`, the one door for objects, and why
    "roles.node.participant_memory",  # whether an announcement has the bytes whose signature was checked
    "roles.policy.mirroring",  # whether the anchor that a mirror computed is the one that the manifest names
    "roles.validator.ledger_repair",  # the links between the entries of a ledger
    "grailnode.observe.ledger_check",  # likewise
    "grailnode.store.decorators.caching",  # what storage and an earlier process left on this machine's disk
    "grailnode.store.decorators.mirrored",  # it asks the origin where a mirror has other bytes
    "grailnode.run.files",  # a file that was fetched before
    "grailnode.run.requirements",  # the file that the operator has named
    "grailnode.run.base_files",  # whether this program writes the files of a base as the run names them
}


def compares_digests(path: Path) -> bool:
    """Return whether `content_digest` stands on a side of a comparison."""
    return any(
        isinstance(part, ast.Name) and part.id == "content_digest"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Compare)
        for part in ast.walk(node)
    )


def test_objects_come_in_through_one_door() -> None:
    comparing = {
        module_name(path) for path in FILES if not within(module_name(path), "protocol") and compares_digests(path)
    }
    assert comparing == MAY_COMPARE_DIGESTS


def import_error(importer: str, target: str) -> str | None:
    """Say why a module of tests/ or bench/ may not import another module of them; None if it may."""
    package, *parts = target.split(".")
    if package == "bench" and within(importer, "tests"):
        return "tests import nothing of bench: move what both use to tests/support"
    if package != "tests" or not parts:
        return None
    if any(part == "conftest" or part.startswith("test_") for part in parts):
        return "nobody imports a test module or a conftest: move what others use to a plain module"
    if parts[0] == "support":
        return None
    if not within(importer, "tests"):
        return "bench imports only tests.support of the tests"
    if within(importer, "tests.support"):
        return "tests/support imports nothing else of the tests"
    if room(importer, "tests") != parts[0]:
        return "a room of tests imports only itself and tests.support: move what two rooms use to tests/support"
    return None


def test_tests_and_benches_share_code_through_support_only() -> None:
    errors = {(name, target): import_error(name, target) for name, target, _ in all_imports(TESTS_AND_BENCHES)}
    assert not {place: error for place, error in errors.items() if error}


@pytest.mark.parametrize(
    ("importer", "target", "error"),
    [
        ("tests.roles.test_gather", "tests.roles.test_follower", "a test module"),
        ("tests.roles.test_gather", "tests.roles.conftest", "a conftest"),
        ("bench.learning", "tests.roles.test_follower", "a test module"),
        ("tests.patch.test_corpus", "bench.fuzz", "nothing of bench"),
        ("tests.support.faults.faulty_store", "bench.fuzz", "nothing of bench"),
        ("bench.patches", "tests.patch.weights", "only tests.support"),
        ("tests.support.builders.chains", "tests.patch.weights", "tests/support imports nothing else"),
        ("tests.roles.test_gather", "tests.patch.weights", "a room of tests imports only itself"),
        ("tests.roles.test_gather", "tests.roles.publisher_testbed", None),
        ("tests.roles.test_gather", "tests.support.builders.chains.Chain", None),
        ("bench.learning", "tests.support.simulation.learning.run", None),
        ("tests.support.faults.faulty_store", "tests.support.faults.faulty_store", None),
    ],
)
def test_an_import_that_bypasses_support_has_a_clear_message(importer: str, target: str, error: str | None) -> None:
    message = import_error(importer, target)
    assert (message is None) if error is None else (message is not None and error in message)


def test_every_module_of_support_lies_in_a_room() -> None:
    flat = {path.name for path in (ROOT / "tests" / "support").glob("*.py")}
    assert flat == {"__init__.py"}


CALLED_BY_LIBRARIES = {  # public methods without a caller in the product: the library that calls them
    "grailnode.cli.main": ("click", {"get_command", "list_commands", "parse_args"}),
    "grailnode.environments.extras.reasoning_gym": ("entry points", {"ReasoningGym"}),
    "grailnode.environments.extras.verifiers": ("tasksets", {"SystemMessage", "TaskData", "Verifiers"}),
    "grailnode.engine.vllm.inside.process_guard": ("vLLM", {"guard"}),
    "grailnode.engine.vllm.inside.sampling_v1": ("vLLM", {"validate_params", "is_argmax_invariant", "update_state"}),
    "grailnode.engine.vllm.inside.sampling_v2": ("vLLM", {"validate_params", "add_request"}),
    "grailnode.node.telemetry": ("trio", {"before_task_step", "after_task_step"}),
    "grailnode.store.https.https_store": ("httpx", {"connect_tcp"}),
}


@dataclass
class Uses:
    """The names that a piece of code uses.

    Attributes:
        names: that it loads.
        members: attributes of anything, and keywords of calls and patterns.
        module_members: attributes of what was imported.
        words: identifiers in its strings: click, vLLM and entry points import by them.
        imported: the local name of each import, and its name in the module that it comes from.
    """

    names: Counter[str] = field(default_factory=Counter)
    members: Counter[str] = field(default_factory=Counter)
    module_members: Counter[str] = field(default_factory=Counter)
    words: Counter[str] = field(default_factory=Counter)
    imported: dict[str, str] = field(default_factory=dict)


def is_list_of_exports(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and any(
        isinstance(name, ast.Name) and name.id == "__all__" for name in node.targets
    )


def uses_of(code: ast.AST) -> Uses:
    """Return what a piece of code uses. A name in `__all__` alone is not used."""
    uses, pending = Uses(), [code]
    modules: Counter[tuple[str, str]] = Counter()
    while pending:
        node = pending.pop()
        if not is_list_of_exports(node):
            pending.extend(ast.iter_child_nodes(node))
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                uses.names[name] += 1
            case ast.Attribute(value=value, attr=name):
                uses.members[name] += 1
                if isinstance(value, ast.Name):
                    modules[value.id, name] += 1
            case ast.keyword(arg=str(name)):
                uses.members[name] += 1
            case ast.MatchClass(kwd_attrs=names):
                uses.members.update(names)
            case ast.Constant(value=str(text)):
                uses.words.update(word for word in text.replace(":", ".").split(".") if word.isidentifier())
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                uses.imported |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in aliases}
    for (module, name), count in modules.items():
        uses.module_members[name] += count * (module in uses.imported)
    return uses


@cache
def product() -> dict[str, tuple[ast.Module, Uses]]:
    """Return each module of the product, and what it uses."""
    trees = {module_name(path): tree(path) for path in FILES}
    return {name: (tree, uses_of(tree)) for name, tree in trees.items()}


def uses_of_all(modules: Iterable[Uses]) -> Uses:
    """Return what all modules use; of names, only those that they import, as they are called where they come from."""
    total = Uses()
    for uses in modules:
        total.words += uses.words
        total.members += uses.members
        total.module_members += uses.module_members
        for local, name in uses.imported.items():
            total.names[name] += uses.names[local]
    return total


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt, bool]]:
    """(name, definition, whether it is a method) for each public function, class, constant and method of a module."""
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node, False
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node, False
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                yield member.name, member, True


def is_click_command(definition: ast.stmt) -> bool:
    decorators = [getattr(item, "func", item) for item in getattr(definition, "decorator_list", ())]
    return any(isinstance(item, ast.Attribute) and item.attr in ("command", "group") for item in decorators)


def unused_definitions() -> Iterator[tuple[str, str]]:
    """(module, name) of each public definition that nothing in the product uses outside of itself.

    Names are compared, types are not: a method counts as used if any object's attribute of its name is used.
    """
    total = uses_of_all(uses for _, uses in product().values())
    for module, (tree, uses) in product().items():
        for name, definition, is_method in public_definitions(tree):
            if name.startswith("_") or is_click_command(definition):
                continue
            own = uses_of(definition)
            count = total.words[name] - own.words[name]
            if is_method:
                count += total.members[name] - own.members[name]
            else:
                count += total.names[name] + total.module_members[name] + uses.names[name] - own.names[name]
            if not count:
                yield module, name


def test_every_public_definition_of_the_product_has_a_caller_in_the_product() -> None:
    """What only tests and benches call belongs to tests/support; what nobody calls is deleted."""
    from_outside = {(module, name) for module, (_, names) in CALLED_BY_LIBRARIES.items() for name in names}
    assert set(unused_definitions()) == from_outside


@pytest.mark.parametrize(
    ("source", "unused"),
    [
        ("def f(): f()", {"f"}),
        ("def f(): pass\n__all__ = ['f']", {"f"}),
        ("def f(): pass\nf()", set()),
        ("def f(): pass\nrun('module:f')", set()),
        ("@group.command()\ndef f(): pass", set()),
        ("class A:\n    def f(self): pass\nA()\ndef g(f): return f\ng(1)", {"f"}),
        ("class A:\n    def f(self): pass\nA().f()", set()),
    ],
)
def test_a_definition_without_a_caller_is_found(source: str, unused: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ast.parse(source)
    monkeypatch.setattr(f"{__name__}.product", lambda: {"module": (tree, uses_of(tree))})
    assert {name for _, name in unused_definitions()} == unused
