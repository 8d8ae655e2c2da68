"""Each trouble alone ends in recovery; pairs by `python -m bench.faults`."""

import pytest

from tests.network.sweep import outcome_in
from tests.network.troubles import TROUBLES


@pytest.mark.parametrize("name", TROUBLES)
def test_a_single_trouble_violates_nothing_and_everybody_works_again(name: str):
    found = outcome_in(TROUBLES[name].weather(seed=1))
    assert found.violations == ()
    assert found.versions >= 1
    assert found.collected >= 1
