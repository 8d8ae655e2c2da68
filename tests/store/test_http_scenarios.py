"""Every fault of HTTP and S3, each alone, between a node's stores and a real service. `bench.faults` runs pairs."""

import pytest
import trio

from tests.store.s3_buckets import Bucket
from tests.support.faults.http_scenarios import HTTP_FAULTS, HttpOutcome, run_http_scenario


@pytest.mark.slow
async def test_nothing_is_lost_under_any_http_fault(rclone_bucket: Bucket):
    outcomes: dict[str, HttpOutcome] = {}
    slots = trio.CapacityLimiter(6)

    async def run(name: str) -> None:
        async with slots:
            outcomes[name] = await run_http_scenario(*rclone_bucket, (name,))

    async with trio.open_nursery() as nursery:
        for name in HTTP_FAULTS:
            nursery.start_soon(run, name)
    assert {name: outcome.violations for name, outcome in outcomes.items() if outcome.violations} == {}
    assert [name for name, outcome in outcomes.items() if not outcome.fault_count] == []
