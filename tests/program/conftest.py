"""A new run of the demo's rules, which tests of its configuration share."""

from pathlib import Path

import pytest

from grailnode.run import workspace
from tests.support.builders.recipes import demo_recipe


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    return workspace.create(tmp_path, demo_recipe()).config
