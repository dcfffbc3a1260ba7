"""The pages of `mixlab report` and `mixlab compare` in a real browser."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mixlab.report import read_comparison, write_page
from mixlab.report.report import collect
from mixlab.report.report_page import write_report
from tests.browser.driver import Browser, Page
from tests.report.invented import model
from tests.report.invented_inputs import compared, everything

pytestmark = pytest.mark.browser
MODELS = "table[aria-labelledby=comparison-0-models]"
RANKED = ["caformer_pico", "convformer_pico", "sequencer2d_pico", "coat_lite_pico"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a second comparison on other data, so that there is something to choose."""
    folder = tmp_path_factory.mktemp("report")
    models = (model("alpha", 80.0, macs=1_000_000), model("beta", 90.0, macs=900_000_000, latency_ms=None))
    other = compared(folder / "other", title="Two models", data="cifar10:x", models=models)
    write_report(collect([*everything(folder), other]), folder / "report.html")
    return folder / "report.html"


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Page]:
    """Whatever a test does, the page neither complains nor asks the network for anything."""
    with browser.page(report) as opened:
        yield opened
        assert opened.errors == []
        assert opened.requests == []


def names(page: Page, table: str = MODELS) -> list[str]:
    return [text.split("\n")[0] for text in page.texts(f"{table} tbody th")]


# -- tables ----------------------------------------------------------------------------------------


def test_a_click_on_a_head_sorts_and_another_turns_the_order(page: Page) -> None:
    assert names(page) == RANKED
    head = f"{MODELS} thead th:nth-child(6)"
    assert page.text(head) == "latency"
    page.click(f"{head} button")
    assert names(page) == ["coat_lite_pico", "convformer_pico", "caformer_pico", "sequencer2d_pico"]
    assert page.evaluate("(head) => document.querySelector(head).ariaSort", head) == "ascending"
    page.click(f"{head} button")
    assert names(page) == ["sequencer2d_pico", "caformer_pico", "convformer_pico", "coat_lite_pico"]
    assert page.evaluate("(head) => document.querySelector(head).ariaSort", head) == "descending"
    assert page.evaluate(f"document.querySelectorAll('{MODELS} [aria-sort]').length") == 1


def test_keys_sort_too(page: Page) -> None:
    page.focus(f"{MODELS} thead th:nth-child(1) button")
    page.press("Enter")
    assert names(page) == sorted(RANKED)
    page.press("Tab", "Tab", "Space")  # to the parameters
    assert names(page) == ["coat_lite_pico", "caformer_pico", "convformer_pico", "sequencer2d_pico"]


def test_what_was_not_measured_stays_last(page: Page) -> None:
    button = f"{MODELS} thead th:nth-child(7) button"
    assert page.text(button) == "peak memory"
    for _ in range(2):
        page.click(button)
        assert names(page)[-1] == "sequencer2d_pico"


def test_texts_sort_as_texts_in_any_column(page: Page) -> None:
    table = "table[aria-labelledby=overview]"
    page.click(f"{table} thead th:nth-child(2) button")
    kinds = page.texts(f"{table} tbody td:nth-child(2)")
    assert kinds == sorted(kinds)
    assert len(set(kinds)) > 3


# -- the chart -------------------------------------------------------------------------------------


def mark(name: str) -> str:
    return f'.mark[aria-label^="{name}:"]'


def test_pointing_at_a_mark_shows_its_numbers(page: Page) -> None:
    assert not page.visible(".tip")
    page.hover(mark("sequencer2d_pico"))
    assert page.text(".tip strong") == "sequencer2d_pico"
    told = page.text(".tip")
    for text in ("95.40 ± 0.57%", "12.0 ms", "1.20 M", "31.0 M", "220", "Four models on digits"):
        assert text in told
    assert "peak memory" not in told  # it was not measured
    page.hover("h1")
    assert not page.visible(".tip")


def test_keys_reach_the_marks_and_go_from_one_to_the_next(page: Page) -> None:
    page.focus("#scatter-axis")
    page.press("Tab")
    assert page.text(".tip strong") == "coat_lite_pico"  # the cheapest
    seen = []
    for _ in range(4):
        page.press("ArrowRight")
        seen.append(page.text(".tip strong"))
    assert seen == ["convformer_pico", "caformer_pico", "sequencer2d_pico", "sequencer2d_pico"]
    page.press("Home")
    assert page.text(".tip strong") == "coat_lite_pico"
    page.press("Escape")
    assert not page.visible(".tip")
    page.press("End", "Tab")  # one stop for all marks
    assert not page.visible(".tip")
    assert page.evaluate("document.activeElement.closest('#scatter')") is None


def test_a_tap_shows_the_numbers(browser: Browser, report: Path) -> None:
    with browser.page(report, width=375, height=800, touch=True) as page:
        page.tap(mark("caformer_pico"))
        assert page.text(".tip strong") == "caformer_pico"
        box = page.evaluate("document.querySelector('.tip').getBoundingClientRect().toJSON()")
        assert box["left"] >= 0
        assert box["right"] <= 375
        page.tap("#costs")
        assert not page.visible(".tip")
        assert page.errors == []


def test_the_cost_can_be_chosen(page: Page) -> None:
    assert page.texts("#scatter-axis option") == ["latency", "MACs", "parameters", "peak memory", "images/s"]
    place = f"document.querySelector('{mark('caformer_pico')}').getBoundingClientRect().x"
    slow = f"document.querySelector('{mark('sequencer2d_pico')}').getBoundingClientRect().x"
    assert page.evaluate(f"{place} < {slow}")
    page.choose("#scatter-axis", "images_per_second")
    assert page.evaluate(f"{place} > {slow}")
    label = page.evaluate("document.querySelector('.stage svg').getAttribute('aria-label')")
    assert label.startswith(
        "top-1 % against images/s for 4 of 4 models; on the frontier, cheapest first: coat_lite_pico"
    )
    page.choose("#scatter-axis", "peak_mb")
    assert page.evaluate("document.querySelectorAll('.mark').length") == 3
    assert "peak memory is not known: sequencer2d_pico" in page.text(".absent")


def test_the_data_can_be_chosen(page: Page) -> None:
    assert page.texts("#scatter-group option") == ["digits, top-1 %", "cifar10:x, top-1 %"]
    page.choose("#scatter-group", "1")
    page.choose("#scatter-axis", "macs")
    assert page.texts("#scatter .legend span") == ["beta", "alpha"]
    assert "logarithmic" in page.evaluate("document.querySelector('.stage').textContent")


def test_the_frontier_is_a_line_through_the_filled_marks(page: Page) -> None:
    filled = page.evaluate(
        "[...document.querySelectorAll('.mark')]"
        ".filter((one) => one.querySelector('path').style.fill.includes('series'))"
        ".map((one) => one.getAttribute('aria-label').split(':')[0]).sort()"
    )
    assert filled == ["caformer_pico", "coat_lite_pico", "convformer_pico"]
    assert page.evaluate("document.querySelector('.frontier').getAttribute('d').match(/H/g).length") == 2


def test_no_mark_or_name_leaves_the_chart(page: Page) -> None:
    for width in (1280, 700, 375):
        page.resize(width, 800)
        page.wait_for("() => Math.abs(document.querySelector('.stage svg').viewBox.baseVal.width"
                      " - document.querySelector('.stage').clientWidth) < 1")  # fmt: skip
        inside = """() => {
          const box = document.querySelector(".scatter").getBoundingClientRect();
          return [...document.querySelectorAll(".mark path, .stage text")].every((one) => {
            const own = one.getBoundingClientRect();
            return own.left >= box.left && own.right <= box.right && own.top >= box.top && own.bottom <= box.bottom;
          });
        }"""
        assert page.evaluate(inside), width


# -- themes, sizes, pictures -----------------------------------------------------------------------

BACKGROUND = "getComputedStyle(document.body).backgroundColor"
LIGHT, DARK = "rgb(251, 251, 250)", "rgb(20, 24, 27)"


@pytest.mark.parametrize(("theme", "first", "second"), [("light", LIGHT, DARK), ("dark", DARK, LIGHT)])
def test_the_theme_is_the_systems_until_it_is_changed(
    browser: Browser, report: Path, theme: str, first: str, second: str
) -> None:
    with browser.page(report, theme=theme) as page:
        assert page.evaluate(BACKGROUND) == first
        before = page.text(".theme")
        page.click(".theme")
        assert page.evaluate(BACKGROUND) == second
        assert {before, page.text(".theme")} == {"Light theme", "Dark theme"}
        page.raw.reload()
        assert page.evaluate(BACKGROUND) == second  # it is kept
        page.click(".theme")
        assert page.evaluate(BACKGROUND) == first


CONTRAST = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => {
    const even = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const parts = rgb(text).slice(0, 3).map((v) => even(v / 255));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const behind = (one) => {
    const color = getComputedStyle(one).backgroundColor;
    return (rgb(color)[3] ?? 1) === 1 || !one.parentElement ? color : behind(one.parentElement);
  };
  const poor = [];
  const words = `h1, h2, h3, h4, p, a, th, td, dt, dd, button, select, label, figcaption, code, .tag, .bar b,
    .legend span, .stage text`;
  for (const one of document.querySelectorAll(words)) {
    const style = getComputedStyle(one);
    const own = light(one.namespaceURI.includes("svg") ? style.fill : style.color);
    const ground = light(behind(one));
    const ratio = (Math.max(own, ground) + 0.05) / (Math.min(own, ground) + 0.05);
    const text = one.textContent.trim().slice(0, 30);
    if (ratio < 4.5 && text) poor.push(`${one.tagName} ${text} ${ratio}`);
  }
  return poor;
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(browser: Browser, report: Path, theme: str) -> None:
    with browser.page(report, theme=theme) as page:
        assert page.evaluate(CONTRAST) == []


@pytest.mark.parametrize("width", [320, 375, 768, 1280])
def test_the_page_is_never_wider_than_its_window(browser: Browser, report: Path, width: int) -> None:
    with browser.page(report, width=width, height=800) as page:
        assert page.overflow() == 0
        if width == 375:  # wide tables scroll inside their box
            assert page.evaluate(
                "[...document.querySelectorAll('.scroll')].some((box) => box.scrollWidth > box.clientWidth)"
            )


def test_every_picture_is_drawn_and_can_be_enlarged(page: Page) -> None:
    assert page.evaluate("[...document.querySelectorAll('.picture img')].map((one) => one.naturalWidth > 0)") == 3 * [
        True
    ]
    page.focus(".picture button")
    page.press("Enter")
    assert page.visible("dialog img")
    page.press("Escape")
    assert not page.visible("dialog")


def test_controls_have_names(page: Page) -> None:
    nameless = """[...document.querySelectorAll("button, select, a, img, .mark, .scroll, svg[role]")].filter((one) =>
      !(one.getAttribute("aria-label") || one.getAttribute("aria-labelledby") || one.textContent.trim() || one.alt
        || one.labels?.length))
      .map((one) => one.outerHTML.slice(0, 80))"""
    assert [one for one in page.evaluate(nameless) if one != '<img alt="">'] == []


def test_it_prints(page: Page, tmp_path: Path) -> None:
    page.raw.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.querySelector('h1')).color") == "rgb(29, 35, 40)"
    assert not page.visible(".theme")
    assert not page.visible("#scatter-axis")
    page.print_to(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


# -- the page of `mixlab compare` ------------------------------------------------------------------


def test_the_page_of_a_comparison_does_the_same(browser: Browser, tmp_path: Path) -> None:
    write_page(read_comparison(compared(tmp_path) / "comparison.json"), tmp_path / "compare.html")
    with browser.page(tmp_path / "compare.html", width=375) as page:
        page.click("thead th:nth-child(1) button")
        assert names(page, "table") == sorted(RANKED)
        page.click(".theme")
        assert page.evaluate(BACKGROUND) == DARK
        assert page.overflow() == 0
        assert page.errors == []
        assert page.requests == []


def test_screenshots_for_people(browser: Browser, report: Path, tmp_path: Path) -> None:
    """Into $MIXLAB_SCREENSHOTS if it is set."""
    folder = Path(os.environ.get("MIXLAB_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    for name, width, theme in (
        ("desktop_light", 1280, "light"),
        ("desktop_dark", 1280, "dark"),
        ("phone", 375, "light"),
    ):
        with browser.page(report, width=width, theme=theme) as page:
            page.hover(mark("caformer_pico"))
            page.screenshot(folder / f"report_{name}.png")
            assert (folder / f"report_{name}.png").stat().st_size > 50_000
