"""The dashboard over HTTP: what it shows, who pays for viewers, and that no stranger's text acts in it."""

import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import trio

from grailnode.node.dashboard_server import Dashboard
from grailnode.node.http_server import Request
from grailnode.observe.state import STORAGE_ALARM
from grailnode.ui.report.dashboard_sections import SECTIONS, Choice, sections_of
from grailnode.ui.report.templates import asset_urls
from tests.support.builders.observed_runs import observed_run
from tests.support.simulation.virtual_clock import simulated
from tests.ui import runs
from tests.ui.dashboards import HOSTILE, Source, serving, usual
from tests.ui.runs import Tags


async def events(address: str, headers: dict[str, str] | None = None) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the server-sent events, each with its id."""
    url, identity = f"{address}events?since=0", ""
    async with httpx.AsyncClient() as client, client.stream("GET", url, headers=headers) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                identity = line[4:]
            elif line.startswith("data: "):
                yield json.loads(line[6:]) | {"id": identity}


async def test_the_page_has_every_part_and_may_run_nothing_but_its_own_script():
    async with serving(usual()) as address, httpx.AsyncClient() as client:
        answer = await client.get(address)
        policy = answer.headers["content-security-policy"]
        assert answer.headers["content-encoding"] == "gzip"
        tags = Tags(answer.text)
        assert tags.open == []
        assert answer.headers["cache-control"] == "no-store"
        assert [value for key, value in tags.attributes if key in ("src", "href")] == list(asset_urls())
        for url in asset_urls():
            file = await client.get(address + url)
            assert len(file.text) > 1000
            assert file.headers["cache-control"] == "public, max-age=31536000, immutable"
            assert (await client.get(f"{address}{url}0")).status_code == 404  # of other bytes
        assert (await client.get(f"{address}../pyproject.toml")).status_code == 404
        assert (await client.post(address)).status_code == 405
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for words in ("held-out pass@1", "0.43 → 0.49", "miner-5", "validator-3", "miners generate", "hard", "19.2 KB"):
        assert words in answer.text
    for words in (
        "wrong-sketch 4",
        "0 to 60, signed and linked",
        "Solve 17+0=",
        "guess",
        "None.",
        "not counted, behind token 9:",
    ):
        assert words in answer.text


@pytest.mark.parametrize("state", [runs.empty(), runs.many_sites(), runs.network(windows=1), runs.hostile()])
def test_every_state_has_all_sections(state):
    sections = sections_of(state)
    assert list(sections) == list(SECTIONS)
    assert all(Tags(html).open == [] for html in sections.values())
    assert sections == sections_of(state)


async def test_an_event_brings_what_has_changed_and_no_more():
    source = usual()
    async with serving(source) as address:
        stream = events(address)
        first = await anext(stream)
        assert set(first["sections"]) == set(SECTIONS) - {"sites"}
        source.change(alarms=("a fork",))
        with trio.fail_after(10):
            while "alarms" not in (news := await anext(stream))["sections"]:
                pass
        assert "a fork" in news["sections"]["alarms"]
        assert set(news["sections"]) <= {"alarms", "tiles", "head"}
        await stream.aclose()
        again = events(address, headers={"Last-Event-ID": news["id"]})  # as a browser that was cut off
        assert not {"miners", "plots"} & set((await anext(again))["sections"])
        await again.aclose()


async def test_viewers_cost_no_readings():
    source = usual()
    async with serving(source) as address, httpx.AsyncClient() as client:
        before = source.readings
        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(client.get, f"{address}?order=best")
        readings = source.readings - before
    assert readings <= 1 + (trio.current_time() - started) / 0.05


async def test_the_page_goes_on_without_storage_and_says_how_old_its_figures_are():
    source = usual()
    async with serving(source) as address, httpx.AsyncClient() as client:
        source.change(alarms=(f"{STORAGE_ALARM}: no route to <b>host</b>",))
        stream = events(address)
        with trio.fail_after(10):
            while STORAGE_ALARM not in (await anext(stream))["sections"].get("head", ""):
                pass
        await stream.aclose()
        text = (await client.get(address)).text
    assert "no route to &lt;b&gt;host&lt;/b&gt;" in text
    assert f'<time data-at="{source.view.state.read_at:.3f}">' in text
    assert "miner-5" in text


async def test_rollouts_are_chosen_by_judgement_order_and_miner():
    async with serving(usual()) as address, httpx.AsyncClient() as client:

        async def names(query: str) -> list[str]:
            text = (await client.get(f"{address}rollouts?{query}")).text
            return [part.partition("</b>")[0] for part in text.split("<b>")[1:]]

        assert await names("order=worst") == [f"miner-{number}" for number in range(6)]
        assert await names("order=best") == [f"miner-{number}" for number in reversed(range(6))]
        assert await names("judgement=rejected") == ["miner-0", "miner-4"]
        assert await names("judgement=wrong-sketch") == ["miner-4"]
        assert await names("judgement=open") == ["miner-1"]
        assert await names("miner=miner-3&order=best") == ["miner-3"]
        assert await names(f"miner={1002:064x}") == ["miner-2"]
        assert await names("order=9&judgement=%00&x=1") == await names("")
        page = (await client.get(f"{address}?judgement=wrong-sketch")).text  # as a form without a script sends it
        assert "1 of 1 that fit" in page


def test_a_hostile_query_is_no_choice():
    for query in ("&".join("abcdefghijk"), "order=best&" * 100, "miner=" + "x" * 100_000, "%ff%fe=%", "="):
        assert len(Choice.of(query).miner) <= 64


async def test_fifty_hostile_strings_stay_text():
    assert len(set(HOSTILE)) == 50
    harmless = Tags("".join(sections_of(observed_run(words=["x" * 9 + str(n) for n in range(50)]).state).values()))
    view = observed_run(words=HOSTILE)
    async with serving(Source(view)) as address, httpx.AsyncClient() as client:
        page = (await client.get(address)).text
        assert "HTTP/1.1" not in page.partition("<html")[0]
        listing = "".join([(await client.get(f"{address}rollouts", params={"miner": word})).text for word in HOSTILE])
        filtered = [(await client.get(address, params={"miner": word})).text for word in HOSTILE]
        stream = events(address)
        sections = (await anext(stream))["sections"]
        await stream.aclose()
    for html in (page, listing, *filtered, *sections.values()):
        tags = Tags(html)
        assert tags.open == []
        scripts = [f'<script src="{url}" defer></script>' for url in asset_urls()]
        assert tags.names.count("script") == sum(map(html.count, scripts))
        assert not {"iframe", "img", "object", "base", "template", "style", "a"} & set(tags.names)
        assert not [key for key, _ in tags.attributes if key.startswith("on") or key in ("srcdoc", "style")]
        assert not set(html) & {"\x00", "\x1b", "\x07", "\N{RIGHT-TO-LEFT OVERRIDE}", "\N{LINE SEPARATOR}"}
    assert set(Tags("".join(sections.values())).names) == set(harmless.names)  # no element that a name brought
    assert "&lt;img src=x onerror=window.acted=1&gt;" in listing


async def test_a_reading_that_finds_new_rollouts_has_a_new_number():
    source = usual()
    async with serving(source) as address:
        stream = events(address)
        first = (await anext(stream))["rollouts"]
        source.view = replace(source.view, rollouts=source.view.rollouts[1:])
        with trio.fail_after(10):
            while (await anext(stream))["rollouts"] == first:
                pass
        await stream.aclose()


def idle_page(streams: int = 2) -> Dashboard:
    """Return a page that shows a state and reads no other."""
    source = usual()
    page = Dashboard("run", source.read, 1.0, source.now, streams)
    page.show(source.view.rollouts, sections_of(source.view.state))
    return page


def stream_of(page: Dashboard, since: str = "0") -> AsyncGenerator[bytes]:
    body = page.respond(Request("/events", f"since={since}", {})).body
    assert not isinstance(body, bytes)
    return body


@simulated
async def test_streams_are_few_and_end():
    page = idle_page()
    first, second, third = (stream_of(page) for _ in range(3))
    assert b'"now"' in await anext(first)
    assert b'"now"' in await anext(second)
    assert [piece async for piece in third] == [b"retry: 10000\n\n"]
    await first.aclose()
    with trio.fail_after(3600):
        assert b'"now"' in b"".join([piece async for piece in stream_of(page)])
        assert [piece async for piece in second]


@simulated
async def test_viewers_who_lack_the_same_sections_share_the_same_bytes():
    page = idle_page(streams=9)
    pieces = []
    for since in ("0", "1", "2"):
        stream = stream_of(page, since)
        await anext(stream)
        pieces.append(await anext(stream))
        await stream.aclose()
    assert pieces[0] is pieces[1] is pieces[2]


def test_the_table_has_the_miners_that_earn_most_and_says_how_many_there_are():
    state = observed_run(miners=1000).state
    html = sections_of(state)["miners"]
    assert html.count("<tr>") == 201
    assert "miner-0<" in html
    assert "miner-999<" not in html
    assert "200 of 1,000 miners" in html
    assert "of 6 miners" not in sections_of(usual().view.state)["miners"]
