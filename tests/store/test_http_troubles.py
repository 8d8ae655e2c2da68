"""Everything that HTTP and S3 can do wrong, each alone, between a node's stores and a real service; pairs by
`bench.faults`.
"""

import pytest
import trio

from tests.store.conftest import Bucket
from tests.support.faults.http_scenarios import HTTP_TROUBLES, HttpOutcome, live_over_http


@pytest.mark.trio
async def test_each_trouble_ends_in_recovery_and_one_clear_line_and_nothing_is_lost(rclone_bucket: Bucket):
    outcomes: dict[str, HttpOutcome] = {}
    slots = trio.CapacityLimiter(6)

    async def live(name: str) -> None:
        async with slots:
            outcomes[name] = await live_over_http(*rclone_bucket, (name,))

    async with trio.open_nursery() as nursery:
        for name in HTTP_TROUBLES:
            nursery.start_soon(live, name)
    assert {name: found.violations for name, found in outcomes.items() if found.violations} == {}
    assert [name for name, found in outcomes.items() if not found.struck] == []
