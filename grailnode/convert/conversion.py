"""`grailnode convert`: converts a weight update to another format by way of the whole weights, so that nothing is lost.

Patches and deltas need the weights that they apply to (`--base`). The result is read again and compared with the
weights before it is written to disk.
"""

from pathlib import Path
from typing import Literal

from grailnode import UserError
from grailnode.convert.slime import read_slime, write_slime
from grailnode.convert.trl import read_trl, write_trl
from protocol import patch
from protocol.chain import safetensors
from protocol.digest import Weights, digest_weights
from protocol.errors import ProtocolError, error_context

Format = Literal["grailnode", "trl", "slime", "safetensors"]


def convert(
    source: Path,
    source_format: Format,
    out: Path,
    out_format: Format,
    base: Path | None,
    version: int,
    base_version: int,
) -> list[Path]:
    """Convert a patch, a safetensors file, or a slime version directory, check, and write; return the files that were
    written. A delta applies to the weights in `base`, a full checkpoint to none. The versions are those of the other
    format.
    """
    with error_context(base):
        base_weights = safetensors.read(base.read_bytes()) if base else None
    with error_context(source):
        weights = _read(source, source_format, base_weights)
    files = _encode(out, out_format, weights, base_weights, version, base_version)
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return list(files)


def _read(source: Path, source_format: Format, base: Weights | None) -> Weights:
    if source_format == "slime":
        return read_slime({file.name: file.read_bytes() for file in source.iterdir() if file.is_file()}, base)
    data = source.read_bytes()
    if source_format == "trl":
        return read_trl(data, base)
    if source_format == "safetensors":
        return safetensors.read(data)
    if base is None:
        raise UserError("a patch needs the weights that it applies to: give --base FILE.safetensors")
    return patch.apply(base, data)


def _encode(
    out: Path, out_format: Format, weights: Weights, base: Weights | None, version: int, base_version: int
) -> dict[Path, bytes]:
    if out_format == "slime":
        directory, files = write_slime(weights, version, base, base_version if base else None)
        _check_equal(weights, read_slime(files, base))
        return {out / directory / name: data for name, data in files.items()}
    if out_format == "trl":
        path, data = write_trl(weights, version, base)
        _check_equal(weights, read_trl(data, base))
        return {out / path: data}
    if out_format == "safetensors":
        data = safetensors.write(weights)
        _check_equal(weights, safetensors.read(data))
        return {out: data}
    if base is None:
        raise UserError("a patch is made from two versions: give --base FILE.safetensors")
    data = patch.encode(base, weights)
    _check_equal(weights, patch.apply(base, data))
    return {out: data}


def _check_equal(weights: Weights, again: Weights) -> None:
    if digest_weights(weights) != digest_weights(again):
        raise ProtocolError("reading the result gives other weights; nothing was written", "conversion")
