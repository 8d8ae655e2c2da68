"""What the programs under test find on a machine that has run them before."""

import pytest

from protocol.patch import warm_up


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Compile the patch kernels once, and cache them: else the first versions of a short run come too late to be looked
    at.
    """
    warm_up()
