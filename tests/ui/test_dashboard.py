"""The dashboard over HTTP: what it shows, who pays for viewers, and that no stranger's text acts in it."""

from dataclasses import replace
from typing import Any

import httpx
import pytest
import trio

from grailnode.observe.state import STORAGE_ALARM
from grailnode.ui.report.dashboard_sections import SECTIONS, Choice, sections_of
from grailnode.ui.report.templates import asset_urls
from tests.support.builders.observed_runs import observed_run
from tests.ui import runs
from tests.ui.dashboards import HOSTILE, Source, serving, usual
from tests.ui.runs import Tags


async def news_of(client: httpx.AsyncClient, address: str, since: int = 0) -> dict[str, Any]:
    news: dict[str, Any] = (await client.get(f"{address}news?since={since}")).json()
    return news


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


async def test_news_are_what_has_changed_and_no_more():
    source = usual()
    async with serving(source) as address, httpx.AsyncClient() as client:
        first = await news_of(client, address)
        news: dict[str, Any] = {"sections": {}}
        assert set(first["sections"]) == set(SECTIONS) - {"sites"}
        source.change(alarms=("a fork",))
        with trio.fail_after(10):
            while "alarms" not in news["sections"]:
                news = await news_of(client, address, first["revision"])
        assert "a fork" in news["sections"]["alarms"]
        assert set(news["sections"]) <= {"alarms", "tiles", "head"}
        assert not {"miners", "plots"} & set((await news_of(client, address, news["revision"]))["sections"])


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
        with trio.fail_after(10):
            while STORAGE_ALARM not in (await news_of(client, address))["sections"].get("head", ""):
                pass
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
        sections = (await news_of(client, address))["sections"]
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
    async with serving(source) as address, httpx.AsyncClient() as client:
        first = (await news_of(client, address))["rollouts"]
        source.view = replace(source.view, rollouts=source.view.rollouts[1:])
        with trio.fail_after(10):
            while (await news_of(client, address))["rollouts"] == first:
                pass


def test_the_table_has_the_miners_that_earn_most_and_says_how_many_there_are():
    state = observed_run(miners=1000).state
    html = sections_of(state)["miners"]
    assert html.count("<tr>") == 201
    assert "miner-0<" in html
    assert "miner-999<" not in html
    assert "200 of 1,000 miners" in html
    assert "of 6 miners" not in sections_of(usual().view.state)["miners"]
