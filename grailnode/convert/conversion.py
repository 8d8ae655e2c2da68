"""`grailnode convert`: one weight update from a format to another, by way of the whole weights, so that nothing can be
lost.

A patch of ours and a delta of anybody else's need the weights that they apply to (`--base`); what is written is read
again and compared before it is kept.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grailnode import UserError
from grailnode.convert import read_slime, read_trl, write_slime, write_trl
from protocol import patch
from protocol.chain import safetensors
from protocol.digest import Weights, digest_weights
from protocol.errors import ProtocolError, error_context

Format = Literal["grailnode", "trl", "slime", "safetensors"]


class ConversionError(UserError):
    """A conversion that was asked for wrongly: says what is missing."""


@dataclass(frozen=True)
class Conversion:
    """What to convert.

    Attributes:
        source: a patch, a safetensors file, or a slime version directory.
        base: weights that a delta applies to; None for a full checkpoint.
        version, base_version: as the other format numbers them.
    """

    source: Path
    given: Format
    wanted: Format
    out: Path
    base: Path | None
    version: int
    base_version: int


def convert(conversion: Conversion) -> list[Path]:
    """Convert, check, and write.

    Returns:
        The files written.

    Raises:
        ProtocolError: the source is not of its format, or does not fit the base.
        ConversionError: the base is missing.
        OSError: a file cannot be read or written.
    """
    with error_context(conversion.base):
        base = safetensors.read(conversion.base.read_bytes()) if conversion.base else None
    with error_context(conversion.source):
        weights = _read(conversion, base)
    files = _written(conversion, weights, base)
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return list(files)


def _read(conversion: Conversion, base: Weights | None) -> Weights:
    source = conversion.source
    if conversion.given == "slime":
        return read_slime({file.name: file.read_bytes() for file in source.iterdir() if file.is_file()}, base).weights
    data = source.read_bytes()
    if conversion.given == "trl":
        return read_trl(data, base).weights
    if conversion.given == "safetensors":
        return safetensors.read(data)
    if base is None:
        raise ConversionError("a patch needs the weights that it applies to: give --base FILE.safetensors")
    return patch.apply(base, data)


def _written(conversion: Conversion, weights: Weights, base: Weights | None) -> dict[Path, bytes]:
    out = conversion.out
    if conversion.wanted == "slime":
        directory, files = write_slime(weights, conversion.version, base, conversion.base_version if base else None)
        _same(weights, read_slime(files, base).weights)
        return {out / directory / name: data for name, data in files.items()}
    if conversion.wanted == "trl":
        path, data = write_trl(weights, conversion.version, base)
        _same(weights, read_trl(data, base).weights)
        return {out / path: data}
    if conversion.wanted == "safetensors":
        data = safetensors.write(weights)
        _same(weights, safetensors.read(data))
        return {out: data}
    if base is None:
        raise ConversionError("a patch is made from two versions: give --base FILE.safetensors")
    data = patch.encode(base, weights)
    _same(weights, patch.apply(base, data))
    return {out: data}


def _same(weights: Weights, again: Weights) -> None:
    if digest_weights(weights) != digest_weights(again):
        raise ProtocolError("reading it again gives other weights; nothing was written", "conversion")
