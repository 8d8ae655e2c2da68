"""The auto profile: the rates are measured, and the profile is chosen for the link. On a virtual clock."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import trio

from grailnode.convert.inspect_patch import inspect_patch
from grailnode.run.creation import Choices
from grailnode.store.memory import MemoryStore
from protocol import patch
from roles.trainer.publish.history import History
from roles.trainer.publish.publisher import Publisher, PublisherSettings
from roles.trainer.publish.rate_meter import FORGET_AFTER, PatchMeasurement, RateMeter
from roles.trainer.publish.version_build import VersionBuild
from tests.support.builders.chains import PunctualBeacon, change_elements, small_weights
from tests.support.builders.snapshots import put_snapshot
from tests.support.simulation.network import Network
from tests.support.simulation.virtual_clock import simulate

ENCODE_SECONDS = {"compact": 0.05, "fast": 0.01}


class SlowStore(MemoryStore):
    """A store behind a link of `link` bytes a second."""

    def __init__(self, link: float) -> None:
        super().__init__()
        self._link = link

    async def put(self, path: str, data: bytes) -> None:
        await trio.sleep(len(data) / self._link)
        await super().put(path, data)


def successive_views(versions: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the BF16 views of successive versions whose masters change a little."""
    random = torch.Generator().manual_seed(1)
    masters = torch.randn((256, 256), generator=random) * 0.0147
    for _ in range(versions):
        yield {"w": masters.bfloat16()}
        masters = masters + torch.randn(masters.shape, generator=random) * 2e-6


async def slow_codec(work: Callable[..., Any], *arguments: object) -> Any:
    """Run work at once, and wait as long as encoding is to take."""
    result = work(*arguments)
    build = getattr(work, "__self__", None)
    if isinstance(build, VersionBuild) and work == build.encode:
        await trio.sleep(ENCODE_SECONDS[build.profile])
    return result


def publish(link: float, settings: PublisherSettings, versions: int = 6) -> tuple[list[dict[str, Any]], SlowStore]:
    """Publish some versions, and return the events of their patches and the store."""
    store = SlowStore(link)

    async def scenario() -> list[dict[str, Any]]:
        network = Network(Choices())
        node = network.node("trainer", "/upload", store)
        node = replace(node, run_sync=slow_codec, beacon=PunctualBeacon())
        for version, snapshot in enumerate(successive_views(versions)):
            await put_snapshot(node.state, version, snapshot)
        with trio.move_on_after(2000):
            await Publisher(node, await History.open(node.state), settings).run()
        return network.events("trainer/upload", "patch")

    return simulate(scenario), store


@pytest.mark.parametrize(("link", "profile"), [(100.0, "compact"), (1e9, "fast")])
def test_auto_measures_both_profiles_and_then_chooses_for_the_link(link: float, profile: str):
    events, store = publish(link, PublisherSettings(profile="auto"))
    assert [event["version"] for event in events] == [1, 2, 3, 4, 5]
    assert [event["profile"] for event in events] == ["compact", "fast", profile, profile, profile]
    assert "not been measured" in events[1]["reason"]
    assert f"{link * 8 / 1e6:.3g} Mbit/s" in events[2]["reason"]

    async def published_profiles() -> list[str]:
        patches = [item.path async for item in store.list("") if "/patches/" in item.path]
        return [inspect_patch(await store.get(path, 1 << 20)).profile for path in patches]

    assert sorted(trio.run(published_profiles)) == sorted(event["profile"] for event in events)


def test_a_configured_link_overrides_the_measured_one():
    events, _ = publish(1e9, PublisherSettings(profile="auto", link_mbps=8e-4))
    assert events[-1]["profile"] == "compact"
    assert "0.0008 Mbit/s" in events[-1]["reason"]


def test_a_configured_profile_is_used():
    events, _ = publish(100.0, PublisherSettings(profile="fast"), versions=3)
    assert {(event["profile"], event["reason"]) for event in events} == {("fast", "as configured")}


def test_a_profile_that_was_not_used_for_long_is_measured_again():
    meter = RateMeter(1e9)
    meter.add_patch(PatchMeasurement("fast", 100, 10, 1.0, 1.0))
    for _ in range(FORGET_AFTER):
        assert "fast" in meter.conditions().rates
        meter.add_patch(PatchMeasurement("compact", 100, 5, 1.0, 1.0))
    assert meter.conditions().rates.keys() == {"compact"}


def test_the_link_rate_is_that_of_recent_uploads():
    meter = RateMeter(None)
    assert meter.conditions().link is None
    for _ in range(40):
        meter.add_upload(1000, 10.0)
    for _ in range(40):
        meter.add_upload(1000, 1.0)
    assert meter.conditions().link == pytest.approx(1000, rel=0.01)


def test_unknown_profiles_and_auto_without_conditions_are_value_errors():
    weights = small_weights(0)
    with pytest.raises(ValueError, match="compact, fast or auto"):
        patch.encode(weights, weights, profile="best")
    with pytest.raises(ValueError, match="needs conditions"):
        patch.encode(weights, weights, profile="auto")


def test_auto_encodes_like_the_profile_that_it_chooses():
    old, new = small_weights(0), change_elements(small_weights(0), 1)
    rates = {"compact": patch.Rates(2e9, 2e9, 0.0045), "fast": patch.Rates(4e9, 4e9, 0.0062)}
    for link, profile in ((1e3, "compact"), (1e12, "fast")):
        conditions = patch.LinkConditions(link, rates)
        encoded = patch.encode_with_digests(old, new, profile="auto", conditions=conditions)
        assert encoded.choice == patch.choose_profile(sum(t.nbytes for t in old.values()), conditions)
        assert encoded.patch == patch.encode(old, new, profile=profile)
