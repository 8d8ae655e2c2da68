"""What the programs under test find on a machine that has run them before."""

import pytest

from tests.support.measuring.patch_kernels import compile_patch_kernels


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Compile the patch kernels once, and cache them: else the first versions of a short run come too late to be looked
    at.
    """
    compile_patch_kernels()
