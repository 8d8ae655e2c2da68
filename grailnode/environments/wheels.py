"""The wheels of a plug-in: packed from what is installed here, and unpacked on other machines.

No wheel is installed: its files lie in a folder of their own, named by the wheel's digest, which is mounted read-only
in the sandbox and on no Python path outside. So nothing of it runs outside, and no tool that installs is needed.
"""

import importlib.metadata
import io
import os
import re
import secrets
import shutil
import sysconfig
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError
from pathlib import Path, PurePosixPath
from typing import Final

from packaging.requirements import Requirement
from packaging.tags import sys_tags
from packaging.utils import canonicalize_name

import grailnode
from grailnode import UserError
from protocol import limits
from protocol.encoding import content_digest
from protocol.environments.record import OWN_DISTRIBUTION, CodeRef
from protocol.errors import LimitError, MalformedError

_MAX_FILES: Final = 20_000  # of one wheel
_MAX_EXTRA_BYTES: Final = 1 << 20  # beside the names; a random match of an entry's mark adds less than a tenth
_MAX_UNPACKED_BYTES: Final = 512 << 20
_MAX_TAGS_BYTES: Final = 1 << 16  # of the file WHEEL, which lists the machines; a usual one has 100 bytes
_MAX_COMPONENT_BYTES: Final = 200
_MAX_PATH_BYTES: Final = 1024
_MAX_PARTS: Final = 16  # of a path
_DATE: Final = (1980, 1, 1, 0, 0, 0)  # of every file of a packed wheel, so that equal files give equal bytes
_REPLACEMENTS: Final = "grailnode.replacements"  # names of distributions that a plug-in does without
_NOT_PACKED: Final = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}  # they describe an installation
_DAMAGES: Final = (  # what zipfile and the file system raise for an archive that is none, or contradicts itself
    *(zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, ValueError, IndexError, RuntimeError),
    *(FileExistsError, IsADirectoryError, NotADirectoryError),
)
_name: Final = re.compile(r"[^/\\\0:]+(/[^/\\\0:]+)*")

SOURCES: Final = Path(grailnode.__file__).parents[1]
"""The folder of this program's packages."""


class PluginError(UserError):
    """A plug-in that cannot be used: says which, why, and what to do."""


@dataclass(frozen=True)
class Wheel:
    """A wheel, and how a run manifest refers to it."""

    ref: CodeRef
    data: bytes


def closure(point: EntryPoint, *others: str) -> list[Distribution]:
    """Return the installed distributions that an environment needs, ascending by name: that of its entry point or, of
    this program's own environments, what the extra of the same name requires; others that are named; and all that these
    require. This program is left out, and what the module of the environment replaces by entry points of the group
    `grailnode.replacements`. PluginError if one is not installed.
    """
    assert point.dist is not None
    own = f"{OWN_DISTRIBUTION}[{point.name}]"
    root = own if canonicalize_name(point.dist.name) == OWN_DISTRIBUTION else point.dist.name
    replacements = point.dist.entry_points.select(group=_REPLACEMENTS, module=point.module)
    left_out = {str(canonicalize_name(replacement.name)) for replacement in replacements}
    distributions: dict[str, Distribution] = {}
    past_requirements: set[tuple[str, frozenset[str]]] = set()
    due = [(text, Requirement(text)) for text in (root, *others)]  # what to install, and what it is required for
    while due:
        advice, requirement = due.pop()
        name, extras = str(canonicalize_name(requirement.name)), frozenset(requirement.extras)
        if name in left_out or (name, extras) in past_requirements:
            continue
        past_requirements.add((name, extras))
        try:
            distributions[name] = importlib.metadata.distribution(name)
        except PackageNotFoundError:
            raise PluginError(
                f"{name}: environment {point.name!r} requires it, and it is not installed: pip install '{advice}'"
            ) from None
        for part in map(Requirement, distributions[name].requires or ()):
            kinds = [kind for kind in ("", *extras) if part.marker is None or part.marker.evaluate({"extra": kind})]
            if name != OWN_DISTRIBUTION and kinds:
                due.append((part.name, part))
            elif kinds and "" not in kinds:  # of an extra alone
                due.append((f"{name}[{kinds[0]}]", part))
    return [distributions[name] for name in sorted(distributions.keys() - {OWN_DISTRIBUTION})]


def pack(distribution: Distribution) -> Wheel:
    """Return the wheel of an installed distribution: the same bytes for the same files; PluginError if its files are
    elsewhere, or another machine could not use it.
    """
    name = canonicalize_name(distribution.metadata["Name"])
    if distribution.read_text("WHEEL") is None:  # what a build leaves beside its sources, first on the path
        place = str(distribution.locate_file("")).rstrip("/") or "."
        raise PluginError(f"{name}: {place} has its sources, not its wheel; leave this folder out of PYTHONPATH")
    files = {
        file.as_posix(): Path(str(distribution.locate_file(file)))
        for file in distribution.files or ()
        if ".." not in file.parts and "__pycache__" not in file.parts and file.name not in _NOT_PACKED
    }
    if "editable" in (distribution.read_text("direct_url.json") or "") or not any(
        not PurePosixPath(path).parts[0].endswith(".dist-info") for path in files
    ):
        raise PluginError(f"{name}: it is installed in place, without its files; install its wheel: pip install PATH")
    return _wheel(name, distribution.version, {path: file.read_bytes() for path, file in files.items()})


def pack_own(point: EntryPoint, version: str) -> Wheel:
    """Return a wheel with the one module of this program that has an environment, however the program is installed. Its
    distribution is called by both names.
    """
    name, path = f"{OWN_DISTRIBUTION}-{point.name}", f"{point.module.replace('.', '/')}.py"
    information = f"{name.replace('-', '_')}-{version}.dist-info"
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": f"[{point.group}]\n{point.name} = {point.value}\n",
    }
    files = {f"{information}/{file}": text.encode() for file, text in texts.items()}
    return _wheel(name, version, files | {path: (SOURCES / path).read_bytes()})


def _wheel(name: str, version: str, files: Mapping[str, bytes]) -> Wheel:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for path, content in sorted(files.items()):
            info = zipfile.ZipInfo(path, _DATE)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(info, content, compresslevel=6)
    data = stream.getvalue()
    if len(data) > limits.MAX_WHEEL_BYTES:
        raise PluginError(f"{name}: a wheel of {len(data)} bytes, more than {limits.MAX_WHEEL_BYTES}")
    ref = CodeRef(distribution=name, version=version, digest=content_digest(data), size=len(data))
    return Wheel(ref, data)


def unpack(wheel: Wheel, folder: Path) -> Path:
    """Return the folder with the files of a wheel, hostile bytes of the digest and the size that a run names, below a
    folder of wheels.

    MalformedError or LimitError if the bytes are no wheel, too large, or would write elsewhere; PluginError for other
    machines.
    """
    target = folder / wheel.ref.digest.hex()
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{secrets.token_hex(8)}"
    try:
        _extract(wheel.data, temporary)
        _check_tags(wheel.ref, temporary)
        try:
            temporary.rename(target)
        except OSError:  # another node of this machine was faster
            if not target.is_dir():
                raise
    except _DAMAGES as error:
        raise MalformedError(f"no wheel ({error})", str(wheel.ref)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _extract(data: bytes, folder: Path) -> None:
    """Write the files of an archive, each of which is new and below a folder."""
    _check_directory(data)
    remaining = _MAX_UNPACKED_BYTES
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        if not {member.compress_type for member in members} <= {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            raise MalformedError("a wheel with files that are compressed by other means than zlib's")
        folder.mkdir()
        for member in members:
            if member.is_dir():
                continue
            target = folder.joinpath(*_parts(member.filename))
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, target.open("xb") as file:  # never through a link, never twice
                while piece := source.read(1 << 16):
                    remaining -= len(piece)
                    if remaining < 0:
                        raise LimitError(f"a wheel of more than {_MAX_UNPACKED_BYTES} bytes")
                    file.write(piece)


def _check_directory(data: bytes) -> None:
    """Refuse an archive whose list of files is long, before zipfile reads that: each entry begins with this mark."""
    count = extra_bytes = 0
    for entry in re.finditer(rb"PK\x01\x02(?=.{26}(..))", data, re.DOTALL):
        count, extra_bytes = count + 1, extra_bytes + int.from_bytes(entry[1], "little")
        if count > _MAX_FILES:
            raise LimitError(f"a wheel of more than {_MAX_FILES} files")
        if extra_bytes > _MAX_EXTRA_BYTES:
            raise LimitError("a wheel whose files have too much beside their names")


def _parts(name: str) -> Sequence[str]:
    parts = name.split("/")
    longest = max(len(os.fsencode(part)) for part in parts)
    is_long = len(parts) > _MAX_PARTS or len(os.fsencode(name)) > _MAX_PATH_BYTES or longest > _MAX_COMPONENT_BYTES
    if not _name.fullmatch(name) or {".", ".."} & set(parts) or is_long:
        raise MalformedError(f"a wheel with a file {name[:80]!r}")
    return parts


def _check_tags(ref: CodeRef, folder: Path) -> None:
    """Refuse a wheel of compiled code for another machine. Python's version is checked by the sandbox."""
    files = list(folder.glob("*.dist-info/WHEEL"))
    if sum(file.stat().st_size for file in files) > _MAX_TAGS_BYTES:
        raise LimitError(f"a wheel with WHEEL files of more than {_MAX_TAGS_BYTES} bytes", str(ref))
    texts = [file.read_text("utf-8", "replace") for file in files]
    if len(texts) != 1:
        raise MalformedError("a wheel without its WHEEL file", str(ref))
    # The platforms alone: a tag stands for each combination of its interpreters, ABIs and platforms, which may be many.
    lists = re.findall(r"^Tag: [\w.]+-[\w.]+-([\w.]+)$", texts[0], re.MULTILINE)
    platforms = {platform.lower() for line in lists for platform in line.split(".")}
    if platforms.isdisjoint({"any", *(tag.platform for tag in sys_tags())}):
        kinds = ", ".join(sorted(platforms))[:_MAX_COMPONENT_BYTES] or "no machine"
        raise PluginError(f"{ref}: this wheel is for {kinds}, and this machine is {sysconfig.get_platform()}")
