"""The dashboard in Chromium: it loads, keeps itself new, filters, outlives store and server, and fits a phone."""

import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest

from grailnode.observe.state import STORAGE_ALARM, VersionRow
from grailnode.ui.report.page import page as report_page
from grailnode.ui.report.templates import ASSETS
from tests.support.builders.observed_runs import observed_run
from tests.support.servers.loopback import in_thread
from tests.ui import runs
from tests.ui.dashboards import HOSTILE, Source, serving, usual

pytestmark = pytest.mark.browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def new_page(browser):
    """Return a function that opens an address; a page that has errors or asks another server fails the test."""
    errors: list[str] = []

    def open_page(address: str, **options):
        page = browser.new_page(**options)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: errors.append("a dialog"))
        page.on("console", lambda message: errors.extend([message.text] * ("Content Security" in message.text)))
        page.on("request", lambda request: errors.extend([request.url] * (not request.url.startswith(address))))
        page.goto(address)
        return page

    yield open_page
    assert not errors


def names(page) -> list[str]:
    texts: list[str] = page.locator(".rollout b").all_inner_texts()
    return texts


def wait_until(page, condition: Callable[[], bool]) -> None:
    """Wait for a condition: the page's policy forbids the evaluation that Playwright's own waiting needs."""
    for _ in range(600):
        if condition():
            return
        page.wait_for_timeout(50)
    pytest.fail("it has not come about")


def test_it_loads_and_keeps_itself_new(new_page):
    source = usual()
    with in_thread(serving(source)) as (address, _):
        page = new_page(address)
        assert page.locator("#miners tbody tr").count() == 6
        page.get_by_text("42 s ago").wait_for()  # the age of the newest version, by the server's clock
        source.time += 60
        source.change(alarms=("a second history",))
        page.get_by_text("a second history").wait_for()
        page.get_by_text("1 min 42 s ago").wait_for()


def last_window(page) -> int:
    """Return the newest window of the plot of learning, of which a page has one, drawn on a canvas."""
    assert page.locator("#learning canvas").count() == 1
    window: int = page.evaluate("plots.get('learning').data[0].at(-1)")
    return window


def test_its_curves_grow_and_leave_a_reader_the_windows_that_he_looks_at(new_page):
    source = usual()
    rows = source.view.state.windows
    source.change(windows=tuple(replace(row, pass_at_1=None) if 9 < row.window < 20 else row for row in rows))
    with in_thread(serving(source)) as (address, _):
        page = new_page(address)
        assert last_window(page) == 59
        gaps = page.evaluate("plots.get('learning').data[1].map((value, at) => value === null && at).filter(Boolean)")
        assert gaps == [*range(10, 21), 58, 59]  # it is measured every third window, and joined over the two between
        source.change(windows=observed_run(windows=90).state.windows)
        wait_until(page, lambda: last_window(page) == 89)
        assert page.evaluate("plots.get('learning').scales.x.max") == 89
        page.evaluate("plots.get('learning').setScale('x', {min: 10, max: 20})")
        source.change(windows=observed_run(windows=700).state.windows)
        wait_until(page, lambda: last_window(page) == 699)
        assert not page.evaluate("plots.get('learning').data[1].slice(0, -3).includes(null)")  # of means of two windows
        assert page.evaluate("plots.get('learning').scales.x.max") == 20


@pytest.mark.parametrize("has_script", [True, False])
def test_the_report_draws_its_curves_from_one_file_and_has_tables_without_a_script(new_page, tmp_path, has_script):
    file = tmp_path / "report.html"
    sizes = [32_200 if number == 150 else None for number in range(300)]
    versions = tuple(VersionRow(number, number, number, size, None, 9, runs.TOTAL) for number, size in enumerate(sizes))
    file.write_text(report_page(runs.report(replace(runs.hostile(), versions=versions))))
    page = new_page(file.as_uri(), java_script_enabled=has_script, viewport={"width": 390, "height": 800})
    assert page.locator(".plot canvas").count() == (3 if has_script else 0)
    assert page.get_by_text("Held-out pass@1 over windows: 0.43 → 0.54").count() == (0 if has_script else 1)
    page.get_by_text("By window (12)").click()
    assert page.locator("details[open] tbody tr").count() == 12
    if has_script:
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.evaluate("plot = plots.get('patch-size')")
        place = "Math.round(plot.valToPos(150, 'x', true)), Math.round(plot.valToPos(32200, 'y', true))"
        assert page.evaluate(f"plot.ctx.getImageData({place}, 1, 1).data[3]")  # a figure between gaps is a point
        assert page.evaluate("plot.axes[1]._values") == ["10 KB", "100 KB", "1 MB", "10 MB"]
        assert page.evaluate("UNIT_OPTIONS.bytes.axis.values(null, [1, null, 100])") == ["1 B", "", "100 B"]
    else:
        assert max(box["height"] for box in (item.bounding_box() for item in page.locator(".plot").all()) if box) < 99


def test_a_page_that_was_opened_before_the_first_reading_lists_the_rollouts_that_come(new_page):
    source = usual()
    whole = source.view
    source.view = replace(whole, rollouts=())
    with in_thread(serving(source)) as (address, _):
        page = new_page(address)
        assert not names(page)
        page.get_by_text("42 s ago").wait_for()
        source.view = whole
        wait_until(page, lambda: len(names(page)) == 6)


def test_the_answer_to_an_older_choice_replaces_no_newer_one(new_page):
    with in_thread(serving(usual())) as (address, _):
        page = new_page(address)
        waiting = []

        def hold(route):
            waiting.append(route)

        page.route("**/rollouts?*judgement=rejected*", hold)
        page.select_option("[name=judgement]", "rejected")
        wait_until(page, lambda: bool(waiting))
        page.select_option("[name=judgement]", "wrong-sketch")
        wait_until(page, lambda: names(page) == ["miner-4"])
        with page.expect_response("**/rollouts?*judgement=rejected*"):
            waiting[0].continue_()
        page.wait_for_timeout(300)
        assert names(page) == ["miner-4"]


def test_it_filters_and_shows_whole_episodes(new_page):
    with in_thread(serving(usual())) as (address, _):
        page = new_page(address)
        assert names(page) == [f"miner-{number}" for number in range(6)]
        page.select_option("[name=order]", "best")
        wait_until(page, lambda: names(page)[0] == "miner-5")
        page.select_option("[name=judgement]", "wrong-sketch")
        wait_until(page, lambda: len(names(page)) == 1)
        assert names(page) == ["miner-4"]
        page.locator(".rollout summary").click()
        assert page.locator(".rollout pre.policy").count() == 2
        assert page.locator(".rollout pre.environment").last.inner_text().startswith("no\n17+4=")
        assert "judgement=wrong-sketch" in page.url
        page.reload()
        assert names(page) == ["miner-4"]


def test_it_outlives_the_store_and_its_server(new_page):
    source = usual()
    with in_thread(serving(source)) as (address, stop):
        page = new_page(address)
        source.change(alarms=(f"{STORAGE_ALARM}: refused",))
        page.locator("#head .alert").wait_for()
        source.time += 300
        page.get_by_text("5 min 1 s ago").wait_for()  # when the figures were read
        source.change(alarms=(), read_at=source.time)
        page.locator("#head .alert").wait_for(state="detached")
        stop()
        page.locator("#link").wait_for(state="visible")
        assert page.locator("#miners tbody tr").count() == 6


@pytest.mark.parametrize(("scheme", "paper"), [("light", "rgb(251, 250, 246)"), ("dark", "rgb(20, 21, 19)")])
def test_it_fits_a_phone_in_dark_and_light(new_page, scheme: str, paper: str):
    with in_thread(serving(Source(observed_run(words=["a-name-of-a-miner-that-is-long" * 2])))) as (address, _):
        page = new_page(address, viewport={"width": 360, "height": 740}, color_scheme=scheme)
        page.get_by_text("42 s ago").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == paper


def test_fifty_hostile_strings_do_nothing(new_page):
    source = Source(observed_run(words=HOSTILE))
    with in_thread(serving(source)) as (address, _):
        page = new_page(address)
        source.change(alarms=("news", *HOSTILE))  # sections that the script puts in, too
        page.locator("#alarms").get_by_text("news").wait_for()
        page.select_option("[name=order]", "best")
        page.evaluate("for (const item of document.querySelectorAll('details')) item.open = true")
        page.fill("[name=miner]", HOSTILE[2])
        wait_until(page, lambda: len(names(page)) == 1)
        assert page.evaluate("window.acted") is None
        assert page.locator("script, iframe, img, object, #rollouts a").count() == len(ASSETS) - 2
