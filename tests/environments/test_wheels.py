"""The code that a run names: wheels of plug-ins as hostile archives, and what a record of an environment says of it."""

import importlib.metadata
import io
import os
import struct
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grailnode.environments import registry
from grailnode.environments.wheels import PluginError, Wheel, pack, unpack
from protocol import environments
from protocol.encoding import content_digest
from protocol.environments.record import CodeRef, EnvironmentSpec
from protocol.errors import LimitError, MalformedError
from tests.support.builders.plugins import install_module
from tests.support.builders.samples import environment
from tests.support.builders.tasks import OWN


def archive(
    *files: tuple[str, bytes], wheel: bytes = b"Tag: py3-none-any\n", compression: int = zipfile.ZIP_DEFLATED
) -> Wheel:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as file:
        for name, data in (*files, ("a-1.dist-info/WHEEL", wheel)):
            file.writestr(name, data)
    return wheel_of(stream.getvalue())


def wheel_of(data: bytes) -> Wheel:
    return Wheel(CodeRef(distribution="a", version="1", digest=content_digest(data), size=len(data)), data)


@pytest.mark.parametrize(
    "name",
    [
        *("../x", "a/../../x", "/x", "a//x", "a\\..\\x", "./x", "C:x"),
        *("a" * 201, "é" * 101, "a/" + "b" * 300, "a/" * 16 + "b", "/".join(["c" * 150] * 8)),
    ],
)
def test_a_wheel_that_would_write_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(MalformedError, match="a wheel with a file"):
        unpack(archive((name, b"x")), tmp_path / "wheels")
    assert [path.name for path in tmp_path.rglob("*")] == ["wheels"]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_wheels_that_contradict_themselves_or_are_none_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = bytearray(archive(("a.py", os.urandom(1000))).data)
    damaged[100] ^= 1
    unnamed = archive(("a.py", b"")).data.replace(b"a.py", b"\0.py")
    for wheel in (
        *(archive(("a", b"1"), ("a", b"2")), archive(("a", b"1"), ("a/b", b"2")), wheel_of(b""), wheel_of(b"PK")),
        *(wheel_of(bytes(damaged)), archive(("b-1.dist-info/WHEEL", b"Tag: py3-none-any"))),
        archive(("b-1.dist-info/WHEEL/a", b"")),
        *(wheel_of(unnamed), archive(compression=zipfile.ZIP_BZIP2), archive(compression=zipfile.ZIP_LZMA)),
    ):
        with pytest.raises(MalformedError):
            unpack(wheel, tmp_path)
    monkeypatch.setattr("grailnode.environments.wheels._MAX_UNPACKED_BYTES", 1 << 20)
    with pytest.raises(LimitError, match="more than 1048576 bytes"):
        unpack(archive(*((f"{number}", bytes(1 << 18)) for number in range(5))), tmp_path)
    with pytest.raises(PluginError, match="for win_amd64, and this machine is linux"):
        unpack(archive(wheel=b"Tag: cp311-cp311-win_amd64\n"), tmp_path)
    with pytest.raises(PluginError, match="for no machine"):  # not: for what moves the terminal's cursor
        unpack(archive(wheel=b"Tag: cp311-cp311-\x1b[2J\n"), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("count", "extra", "words"),
    [(500_000, b"", "a wheel of more than 20000 files"), (100, bytes(65532), "too much beside their names")],
)
def test_an_archive_that_takes_long_to_list_is_refused_before_it_is_listed(
    count: int, extra: bytes, words: str, tmp_path: Path
) -> None:
    """Listing it takes zipfile 15 seconds: it splits what stands beside a name in time that grows as the square."""
    entries = b"".join(
        struct.pack("<4s24x3H12x", b"PK\1\2", 4, len(extra), 0) + number.to_bytes(4, "little") + extra
        for number in range(count)
    )
    end = struct.pack("<4s4x2H2L2x", b"PK\5\6", *[min(count, 65535)] * 2, len(entries), 0)
    begin = time.process_time()
    with pytest.raises(LimitError, match=words):
        unpack(wheel_of(entries + end), tmp_path)
    assert time.process_time() - begin < 3.0


def test_a_tag_that_stands_for_millions_costs_no_more_than_another(tmp_path: Path) -> None:
    parts = ".".join(f"x{number}" for number in range(170))
    begin = time.process_time()
    with pytest.raises(PluginError, match=r"this wheel is for x0, x1, x10, .{1,300}, and this machine is"):
        unpack(archive(wheel=f"Tag: {parts}-{parts}-{parts}\n".encode()), tmp_path)
    assert time.process_time() - begin < 1.0


def test_a_long_wheel_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    others = ((f"{number}.dist-info/WHEEL", bytes(1 << 15)) for number in range(2))
    with pytest.raises(LimitError, match="a wheel with WHEEL files of more than 65536 bytes"):
        unpack(archive(*others), tmp_path)


def test_a_link_in_a_wheel_is_a_file(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        info = zipfile.ZipInfo("link")
        info.external_attr = 0o120777 << 16
        file.writestr(info, "/etc/passwd")
        file.writestr("a-1.dist-info/WHEEL", "Tag: py3-none-any")
    folder = unpack(wheel_of(stream.getvalue()), tmp_path)
    assert not (folder / "link").is_symlink()
    assert (folder / "link").read_text() == "/etc/passwd"


def test_an_installed_distribution_gives_the_same_wheel_twice(tmp_path: Path) -> None:
    (distribution,) = importlib.metadata.distributions(path=[str(install_module("a", "x = 1", tmp_path / "a"))])
    wheel = pack(distribution)
    assert pack(distribution) == wheel
    folder = unpack(wheel, tmp_path / "wheels")
    assert (folder / "a.py").read_text() == "x = 1"
    assert unpack(replace(wheel, data=b""), tmp_path / "wheels") == folder  # which is there already


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "chess"}, "unknown environment 'chess'; there are: addition, "),
        ({}, r"of this run is that of grailnode 0\.1\.0 \(fbc6c1d4c3b6db8f\), and here .* the version is the same"),
    ],
)
def test_other_code_is_named_in_one_line_with_this_programs(change: dict[str, str], words: str) -> None:
    with pytest.raises(PluginError, match=words) as error_info:
        registry.check_code(environment(**change))
    assert "\n" not in str(error_info.value)


@pytest.mark.parametrize("name", ["addition", "math", f"code-{OWN}"])
def test_this_programs_own_code_is_accepted_if_the_record_says_what_it_is(name: str) -> None:
    spec = registry.built_in_spec(name)
    registry.check_code(spec)
    with pytest.raises(PluginError, match="contradicts its code"):
        registry.check_code(spec.model_copy(update={"exact": not spec.exact}))


def test_every_built_in_environment_is_registered_with_the_module_of_its_class() -> None:
    points = importlib.metadata.distribution("grailnode").entry_points.select(group="grailnode.environments")
    modules = {point.name: point.module for point in points if point.module.startswith("protocol.")}
    assert modules == {name: environments.module(name) for name in environments.names + environments.data_names}


def test_the_digest_of_modules_covers_what_they_import() -> None:
    digests = {name: registry.built_in_spec(name).code[0].digest for name in ("addition", "sat", "math", "code-3.11")}
    assert len(set(digests.values())) == 4
    assert registry.built_in_spec("code-3.12").code[0].digest == digests["code-3.11"]


CODE = CodeRef(distribution="a", version="1", digest=bytes(32), size=1)


@pytest.mark.parametrize(
    "change",
    [
        *({"python": ""}, {"python": "2.7"}, {"name": ""}, {"name": "a/b"}, {"code": ()}, {"code": (CODE, CODE)}),
        *({"config": b'{"b":1,"a":1}'}, {"config": b"{ }"}, {"config": b"[]"}, {"config": b'{"a":NaN}'}),
        *({"config": b"{"}, {"config": '{"a":"é"}'.encode()}, {"config": b'{"a":1,"a":1}'}, {"config": b"1" * 70_000}),
        {"code": (CODE, CodeRef(distribution="b", version="1", digest=bytes(32), size=0))},
    ],
    ids=str,
)
def test_a_record_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {
        "name": "a",
        "code": (CODE,),
        "python": "3.11",
        "config": b'{"a":[1,"\\u00e9"]}',
        "exact": True,
    }
    assert EnvironmentSpec.from_bytes(EnvironmentSpec(**fields).to_bytes()).is_plugin
    with pytest.raises((ValueError, MalformedError)):
        EnvironmentSpec(**(fields | change))
