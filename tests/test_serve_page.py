"""The page in a real browser: it runs a policy, compares two, stops, says what went wrong, and works with keyboard and
phone. Without Chromium there is nothing to test it with.
"""

import shutil

import pytest
from serving import NEST, served

from nestling.engine.engine import Engine

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def engine():
    with Engine(NEST) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine):
    with served(engine) as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    """The page, loaded; what its script complains of is an error."""
    page = browser.new_page()
    faults = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: faults.append(request.url) if not request.url.startswith(server.url) else None)
    page.goto(server.url)
    page.wait_for_selector("#run:enabled")
    yield page
    page.close()
    assert not faults


DONE = """number => !document.getElementById("run").disabled && number ===
    [...document.querySelectorAll(".state")].filter(one => /^(done|stopped|failed)/.test(one.textContent)).length"""


def wait_done(page, number=1):
    page.wait_for_function(DONE, arg=number, timeout=30_000)


def color(page, selector, name="color"):
    """A computed color as three numbers."""
    told = page.eval_on_selector(selector, "(one, name) => getComputedStyle(one)[name]", name)
    return [int(part) for part in told[4:-1].split(",")]


def test_a_question_is_answered_in_two_colors_with_what_each_phase_took(page):
    page.fill("#prompt", "7+8+7")
    page.locator("[data-is=think]").first.select_option("70")
    page.locator("[data-is=answer]").first.select_option("100")
    page.click("#run")
    wait_done(page)
    assert page.inner_text(".text.thinking") == "7+8=7+8=15:15;15+7=5+7=12,1+0+1=2:22"
    assert page.inner_text(".text.answering") == "22"
    assert color(page, ".text.thinking") != color(page, ".text.answering")
    rows = [row.inner_text().split() for row in page.locator("tbody tr").all()]
    assert [row[:3] for row in rows[:2]] == [["thinking", "70", "37"], ["answer", "100", "3"]]
    assert "hand-over by prefill" in page.inner_text("tbody")
    widths = [part.bounding_box()["width"] for part in page.locator(".bar i").all()]
    whole = page.locator(".bar").bounding_box()["width"]
    assert len(widths) == 3
    assert sum(widths) == pytest.approx(whole, rel=0.01)


def test_two_policies_are_compared_on_the_same_prompt(page):
    page.fill("#prompt", "35*58")
    page.check("#compare")
    page.locator("[data-is=budget]").nth(1).fill("5")
    page.click("#run")
    wait_done(page, 2)
    first, second = page.locator("article").all()
    assert first.locator(".text.answering").inner_text() == "2030"
    assert len(second.locator(".text.thinking").inner_text()) < len(first.locator(".text.thinking").inner_text())
    assert "cut by its budget" in second.locator(".state").inner_text()
    lengths = [sum(part.bounding_box()["width"] for part in one.locator(".bar i").all()) for one in (first, second)]
    seconds = [
        [float(one.locator("tbody tr").nth(i).locator("td").last.inner_text()) for i in (0, 1)]
        for one in (first, second)
    ]
    shown = 0.0005 * 2  # seconds are shown in thousandths, two rows added
    scales = [
        (length / (sum(rows) + shown), length / (sum(rows) - shown))
        for length, rows in zip(lengths, seconds, strict=True)
    ]
    assert max(low for low, _ in scales) <= min(high for _, high in scales)  # one scale for both bars


def test_the_keyboard_alone_runs_and_stops(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("gcd 15,85")
    page.keyboard.press("Control+Enter")
    wait_done(page)
    assert page.inner_text(".text.answering") == "5"
    page.fill("#prompt", "bits 6625")
    page.evaluate("document.addEventListener('keydown', () => document.title = 'pressed')")
    page.keyboard.press("Control+Enter")
    page.keyboard.press("Escape")
    wait_done(page)
    assert page.inner_text(".state").startswith(("stopped", "done"))
    assert page.is_enabled("#run")


def test_what_went_wrong_is_said_and_the_next_run_works(page):
    page.fill("#prompt", "7+8+7")
    page.fill("#max_tokens", "99999999")
    page.click("#run")
    wait_done(page)
    assert "tokens" in page.inner_text("article .error")
    page.fill("#max_tokens", "")
    page.click("#run")
    wait_done(page)
    assert page.inner_text(".text.answering") == "22"
    assert not page.is_visible("article .error")


def test_markup_in_a_prompt_or_an_answer_stays_text(page):
    page.fill("#prompt", "<img src=x onerror=alert(1)>")
    page.fill("#max_tokens", "40")
    page.click("#run")
    wait_done(page)
    assert page.locator("img").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_light_and_dark(browser, server, scheme):
    page = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme=scheme, has_touch=True)
    page.goto(server.url)
    page.wait_for_selector("#run:enabled")
    page.fill("#prompt", "7+8+7")
    page.check("#compare")
    page.tap("#run")
    wait_done(page, 2)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    low = [one.bounding_box()["height"] for one in page.locator("button, select, textarea").all()]
    assert min(low) >= 40  # a finger's width
    paper, ink = (sum(color(page, "body", name)) for name in ("backgroundColor", "color"))
    assert (paper > ink) == (scheme == "light")
    page.close()


def test_a_key_is_asked_for_where_the_server_wants_one(browser, engine):
    with served(engine, api_key="secret") as server:
        page = browser.new_page()
        page.goto(server.url)
        page.wait_for_selector("#key:visible")
        assert "API key" in page.inner_text("#fault")
        page.fill("#key", "secret")
        page.keyboard.press("Tab")
        page.wait_for_selector("#run:enabled")
        page.fill("#prompt", "7+8+7")
        page.click("#run")
        wait_done(page)
        assert page.inner_text(".text.answering") == "22"
        page.close()
