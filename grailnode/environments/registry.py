"""The environments that this machine has, by name: the built-in ones, and those of installed plug-ins.

Each has an entry point of the group `grailnode.environments`: built-in ones and those of extras of this program's own
distribution, plug-ins of others. Entry points are read here as text. Only the sandbox imports what they name; built-in
environments, whose code no run brings along, are those of protocol/environments.
"""

import ast
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from types import MappingProxyType
from typing import Final

import platformdirs

import protocol.environments
from grailnode.environments.plugin_environment import PluginEnvironment
from grailnode.environments.wheels import SOURCES, PluginError, Wheel, closure, pack, pack_own, unpack
from grailnode.sandbox import BubblewrapSandbox
from grailnode.sandbox.inside.plugin_host import GROUP
from protocol import bounded_json, environments, limits
from protocol.encoding import content_digest
from protocol.environments import Requirements
from protocol.environments import rubric as rubrics
from protocol.environments.record import (
    OWN_DISTRIBUTION,
    SHARES,
    CodeRef,
    EnvironmentShare,
    EnvironmentSpec,
    MixtureSpec,
    canonical_config,
)
from protocol.environments.rubric import Rubric
from protocol.errors import ProtocolError

OWN_PYTHON: Final = f"{sys.version_info[0]}.{sys.version_info[1]}"
_READERS: Final = {"gsm8k": "math", "math500": "math", "mbpp": f"code-{OWN_PYTHON}"}
_EXAMPLES: Final = ("gymnasium", "textarena", "tools", "webassembly")
ADVICE: Final = {
    **{name: f"problems in this form are read by --environment {own} --data FILE" for name, own in _READERS.items()},
    **{name: f"a plug-in: pip install ./examples/{name} in a checkout of grailnode" for name in _EXAMPLES},
    "reasoning_gym": "a task of --environment reasoning-gym: name it in --environment-config",
}
"""What to do about names that others use: of data sets, and of libraries for which examples/ has a plug-in."""

_BUILT_IN: Final = environments.names + environments.data_names
_PACKAGE: Final = "protocol.environments"
_IMPORTED: Final = {"verifiers": "id"}  # what in a configuration names a distribution that the environment imports
_REPLY_TOKENS: Final = 512  # of a plug-in's episodes, by default
_distribution_name: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_shares: Final = re.compile(r"[^=,]+=[1-9][0-9]{0,6}(,[^=,]+=[1-9][0-9]{0,6})*")


@dataclass(frozen=True)
class Plugin:
    """An environment of an installed plug-in, with the wheels of all code that it needs."""

    spec: EnvironmentSpec
    wheels: tuple[Wheel, ...]
    environment: PluginEnvironment


def distributions() -> dict[str, str]:
    """Return each environment's name, with name and version of its distribution, or of all that claim it."""
    points = importlib.metadata.entry_points(group=GROUP)
    return {name: _owners(points.select(name=name)) for name in sorted({*points.names, *_BUILT_IN})}


def is_built_in(name: str) -> bool:
    """Return whether a name is that of a built-in environment; PluginError if several distributions claim it, or this
    program's entry points are not those of its code.
    """
    points = importlib.metadata.entry_points(group=GROUP, name=name)
    if len(points) > 1:
        raise PluginError(f"environment {name!r}: {_owners(points)} both have this name; uninstall one of them")
    is_registered = any(_is_own(point) and point.module.startswith(f"{_PACKAGE}.") for point in points)
    if is_registered != (name in _BUILT_IN):
        again = f"rm -rf {SOURCES}/grailnode.egg-info; pip install -e {SOURCES}"  # pip keeps what a build left there
        raise PluginError(f"environment {name!r}: grailnode was installed before its code changed: {again}")
    return is_registered


def _is_own(point: EntryPoint) -> bool:
    return point.dist is not None and point.dist.name == OWN_DISTRIBUTION


def _owners(points: Iterable[EntryPoint]) -> str:
    return " and ".join(f"{point.dist.name} {point.dist.version}" for point in points if point.dist)


def requirements(name: str, config: str = "{}") -> Requirements:
    """Return what an environment requires; a plug-in is opened once for each configuration, since it says its turns."""
    if is_built_in(name):
        return environments.requirements(name)
    turns = _turns(name, config, str(_plugin(name)[1].locate_file("")))
    return Requirements(python=OWN_PYTHON, turns=turns, reply_tokens=_REPLY_TOKENS if turns > 1 else 0)


@cache
def _turns(name: str, config: str, place: str) -> int:
    """Return the most turns of a plug-in that is installed at a place."""
    environment = open_plugin(name, config).environment
    environment.close()
    return environment.turns


def parse_mixture(text: str) -> dict[str, int]:
    """Return ascending names with shares, of 'NAME' or 'NAME=MILLIONTHS,...'; PluginError if they are no mixture."""
    if "=" not in text:
        return {text: SHARES}
    pairs = [part.split("=") for part in text.split(",")] if _shares.fullmatch(text) else []
    shares = {name: int(share) for name, share in sorted(pairs)}
    if len(shares) < len(pairs) or sum(shares.values()) != SHARES or len(shares) > limits.MAX_MIXTURE_MEMBERS:
        raise PluginError(
            f"environment {text!r}: a mixture is NAME=SHARE,NAME=SHARE of up to {limits.MAX_MIXTURE_MEMBERS} different "
            f"environments, with shares in millionths that add up to {SHARES}"
        )
    return shares


def built_in_spec(name: str, rubric: Rubric = ()) -> EnvironmentSpec:
    """Return the record of a built-in environment with the rubric of its rewards."""
    digest = _digest_of_modules(environments.module(name), *([rubrics.__name__] if rubric else []))
    code = CodeRef(distribution=OWN_DISTRIBUTION, version=_own_version(), digest=digest, size=0)
    python, exact = environments.requirements(name).python, environments.is_exact(name)
    return EnvironmentSpec(name=name, code=(code,), python=python, config=b"{}", exact=exact, rubric=rubric)


def task_spec(
    text: str, plugins: Mapping[str, EnvironmentSpec] = MappingProxyType({}), rubric: str = ""
) -> MixtureSpec:
    """Return the record of a task, as `parse_mixture` reads it, with the records of its plug-ins by name and the rubric
    of each reward; PluginError if the rubric is none.
    """
    try:
        parts = rubrics.parse(rubric)
    except ValueError as error:
        raise PluginError(f"--rubric {rubric}: no rubric, such as score=7/10,thinking=1/10,overlong:512=1") from error
    specs = {
        name: plugins[name].model_copy(update={"rubric": parts}) if name in plugins else built_in_spec(name, parts)
        for name in parse_mixture(text)
    }
    return tuple(EnvironmentShare(ppm=share, environment=specs[name]) for name, share in parse_mixture(text).items())


def open_plugin(
    name: str, config: str, folder: Path | None = None, *, hash_seed: int = 0, strict: bool = False
) -> Plugin:
    """Pack the wheels of an installed plug-in, and open its environment as nodes will: from these, in the sandbox. They
    are unpacked in a folder, by default of the user's cache. PluginError or SandboxError if it cannot be packed, or
    does not load.
    """
    text = parse_config(config)
    point, distribution = _plugin(name)
    own = [pack_own(point, distribution.version)] if _is_own(point) else []
    imported = json.loads(text).get(_IMPORTED.get(name)) if own else None
    others = [imported] if isinstance(imported, str) and _distribution_name.fullmatch(imported) else []
    packed = [*own, *(pack(part) for part in closure(point, *others))]
    wheels = tuple(sorted(packed, key=lambda wheel: wheel.ref.distribution))
    directory = folder or platformdirs.user_cache_path("grailnode") / "wheels"
    folders = [unpack(wheel, directory) for wheel in wheels]
    base = BubblewrapSandbox.open(OWN_PYTHON)
    environment = PluginEnvironment.open(base, folders, name, text, hash_seed, strict=strict)
    code = tuple(wheel.ref for wheel in wheels)
    spec = EnvironmentSpec(name=name, code=code, python=OWN_PYTHON, config=text, exact=environment.exact)
    return Plugin(spec, wheels, environment)


def parse_config(config: str) -> bytes:
    """Return the canonical text of a configuration; PluginError if it is no JSON object, or too large."""
    try:
        return canonical_config(bounded_json.parse(config.encode(errors="replace"), bounded_json.unique))
    except ProtocolError as error:
        raise PluginError(f"--environment-config: {error}") from error


def check_code(spec: EnvironmentSpec) -> None:
    """Raise PluginError if this program's code of a run's environment is missing, or is not the run's."""
    if spec.is_plugin:
        return
    if spec.name not in _BUILT_IN:
        raise PluginError(f"unknown environment {spec.name!r}; there are: {', '.join(distributions())}")
    own = built_in_spec(spec.name, spec.rubric)
    code, here = spec.code[0], own.code[0]
    if here.digest != code.digest:
        advice = f"install {code.distribution} {code.version}"
        if here.version == code.version:
            advice = "the version is the same and the code is not; install the wheel or commit of the run's founder"
        raise PluginError(
            f"environment {spec.name!r} of this run is that of {code}, and here it is that of {here}: {advice}"
        )
    if own.model_copy(update={"code": spec.code}) != spec:
        raise PluginError(f"environment {spec.name!r}: this run's record contradicts its code")


def _plugin(name: str) -> tuple[EntryPoint, Distribution]:
    """Return the entry point of a plug-in, and its distribution; a PluginError says what to do if there is none."""
    for point in importlib.metadata.entry_points(group=GROUP, name=name):
        if point.dist is not None and not is_built_in(name):
            return point, point.dist
    words = {re.sub("[^a-z0-9]", "", word) for word in re.split("[/:]", name.lower())}  # of openai/GSM8K
    for known, advice in ADVICE.items():
        if known.replace("_", "") in words:
            raise PluginError(f"environment {name!r}: {advice}")
    raise PluginError(f"unknown environment {name!r}; there are: {', '.join(distributions())}")


@cache
def _own_version() -> str:
    try:
        return importlib.metadata.version(OWN_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:  # a copy of the sources that is not installed
        return "0"


@cache
def _digest_of_modules(*modules: str) -> bytes:
    """Return the SHA-256 of modules and of what they import of protocol/environments (docs/spec/environments.md)."""
    folder, found, names = Path(protocol.environments.__file__).parent, dict[str, bytes](), [*modules]
    while names:
        name = names.pop()
        file = folder / f"{name.rpartition('.')[2]}.py"
        if name in found or not name.startswith(f"{_PACKAGE}.") or not file.is_file():
            continue
        found[name] = file.read_bytes()
        for node in ast.walk(ast.parse(found[name])):
            if isinstance(node, ast.ImportFrom) and node.module:
                names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    lines = [f"{name} {content_digest(data).hex()}\n" for name, data in sorted(found.items())]
    return content_digest("".join(lines).encode())
