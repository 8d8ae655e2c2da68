"""The kernels of the patch codec, compiled before anything is measured."""

from protocol.patch.entropy_decoding import decoders_for
from protocol.patch.entropy_encoding import coders_for


def compile_patch_kernels() -> None:
    """Compile the kernels for BF16, which takes seconds the first time on a machine; later they are loaded from a
    cache.
    """
    coders_for(2)
    decoders_for(2)
