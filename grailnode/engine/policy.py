"""A policy as a directory, in the layout of a Hugging Face checkpoint.

    config.json                     the architecture
    generation_config.json          optional; its end-of-sequence tokens override that of config.json
    tokenizer.json                  the tokenizer, in the format of the `tokenizers` library
    tokenizer_config.json           optional, as is chat_template.jinja: what a chat run needs (grailnode/chat)
    model.safetensors               the weights, or model.safetensors.index.json with its shards

Everything is read from the disk as data: no code of the checkpoint runs and nothing is downloaded.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer as _Tokenizer
from torch import Tensor

from grailnode import UserError
from protocol import bounded_json, limits
from protocol.errors import MalformedError

_CONFIG: Final = "config.json"
_GENERATION_CONFIG: Final = "generation_config.json"
_TOKENIZER: Final = "tokenizer.json"
_WEIGHTS: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_TIED: Final = "lm_head.weight"
_MAX_BYTES: Final = 64 << 20  # of a file that is not weights

PACKAGED_POLICY: Final = Path(__file__).parents[1] / "data" / "genesis"
"""The policy directory of this package; `python -m tests.support.builders.genesis --seed 0` reproduces it."""


class PolicyError(UserError):
    """A directory without a usable policy; the message names the file and says what to do."""


def read_text(path: Path) -> str:
    """Return the text of a file of a policy directory, or raise PolicyError if it cannot be read or is too large."""
    try:
        with path.open("rb") as file:
            # One byte more than is allowed, which a file that is too large has.
            data = file.read(_MAX_BYTES + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        what = (error.strerror or "no file").lower() if isinstance(error, OSError) else "not UTF-8"
        raise PolicyError(
            f"{path}: cannot be read ({what}); a policy is a Hugging Face checkpoint directory"
        ) from error
    if len(data) > _MAX_BYTES:
        raise PolicyError(f"{path}: larger than {_MAX_BYTES} bytes")
    return text


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a policy directory, or raise PolicyError if there is none."""
    try:
        value = bounded_json.parse(read_text(path).encode())
    except MalformedError as error:
        raise PolicyError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise PolicyError(f"{path}: not a JSON object")
    return value


class Tokenizer:
    """Converts text to token ids and back, as a tokenizer.json says; a text that is no tokenizer raises PolicyError."""

    def __init__(self, text: str) -> None:
        try:
            self._tokenizer = _Tokenizer.from_str(text)
        except Exception as error:  # the library raises nothing more specific
            raise PolicyError(f"{_TOKENIZER}: not a tokenizer ({error})") from error
        # A tokenizer.json may ask for both, which would change the prompts.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text; with the tokens that the tokenizer puts around every text (Qwen's puts none)
        unless `special` is False, as for a conversation, whose template writes them.
        """
        return tuple(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens by name: a completion cannot hide one from an environment."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    @property
    def unknown(self) -> int | None:
        """The id for text that the vocabulary has no token for; None if the tokenizer has no such id."""
        token = getattr(self._tokenizer.model, "unk_token", None)
        token_id = None if token is None else self._tokenizer.token_to_id(token)
        return None if token_id is None else int(token_id)


@dataclass(frozen=True)
class Policy:
    """A policy without its weights; `stops` are the token ids that end a completion, ascending."""

    directory: Path
    config: Mapping[str, Any]
    tokenizer: Tokenizer
    stops: tuple[int, ...]

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read everything but the weights; PolicyError names a file that is missing or broken."""
        config = read_json(directory / _CONFIG)
        generation = directory / _GENERATION_CONFIG
        overrides = read_json(generation) if generation.is_file() else {}
        # As in transformers, what the generation config says comes first.
        eos = overrides.get("eos_token_id", config.get("eos_token_id"))
        stops: list[Any] = eos if isinstance(eos, list) else [eos]
        if not 0 < len(stops) <= limits.MAX_STOP_TOKENS or not all(type(stop) is int and stop >= 0 for stop in stops):
            source = _GENERATION_CONFIG if "eos_token_id" in overrides else _CONFIG
            raise PolicyError(
                f"{directory / source}: eos_token_id is {'missing' if eos is None else 'not usable'}; give the id that "
                f"ends a completion, or a list of up to {limits.MAX_STOP_TOKENS}"
            )
        return cls(directory, config, Tokenizer(read_text(directory / _TOKENIZER)), tuple(sorted(set(stops))))

    @property
    def vocabulary(self) -> int:
        """The number of token ids of the model; the tokenizer may have fewer."""
        size = self.config.get("vocab_size")
        if not isinstance(size, int):
            raise PolicyError(f"{self.directory / _CONFIG}: vocab_size is missing")
        return size


def load_weights(directory: Path) -> dict[str, Tensor]:
    """Return the weights as they are published: contiguous BF16 tensors on the CPU, by the names in the files.

    Other floating-point dtypes are rounded to BF16. If config.json ties the output projection to the embedding, only
    the embedding is returned. PolicyError if a file is missing or broken, or holds integers (a quantized checkpoint).
    """
    weights: dict[str, Tensor] = {}
    for path in weight_files(directory):
        try:
            weights |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise PolicyError(f"{path}: cannot be read as safetensors ({error})") from error
    # A tied projection is left out before anything is converted: it may be a copy in the file.
    weights = {name: weights[name] for name in published_names(directory, weights)}
    for name, tensor in weights.items():
        if not tensor.is_floating_point():
            raise PolicyError(f"{directory}: {name} has dtype {tensor.dtype}; use a checkpoint that is not quantized")
    return {name: weights[name].to(torch.bfloat16).contiguous() for name in sorted(weights)}


def published_names(directory: Path, names: Iterable[str]) -> list[str]:
    """Return the names of the tensors that are published: all but an output projection that is the embedding."""
    tied = read_json(directory / _CONFIG).get("tie_word_embeddings")
    # The embedding stands for both, so that a patch has each change once.
    return [name for name in names if not (tied and name == _TIED)]


def weight_files(directory: Path) -> list[Path]:
    """Return the weight files; PolicyError if the index is broken, or names a file outside the directory."""
    index = directory / _INDEX
    if not index.is_file():
        return [directory / _WEIGHTS]
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise PolicyError(f"{index}: weight_map does not map names to files")
    # A checkpoint may be a stranger's: its index may not point out of the directory.
    if any(Path(name).name != name for name in names.values()):
        raise PolicyError(f"{index}: weight_map names a file outside the directory")
    return [directory / name for name in sorted(set(names.values()))]
