import builtins
import functools
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mixlab.core.errors import MixlabError
from mixlab.report import Budget, render_page, write_page
from tests.report.invented import comparison, model, several

VOID = {"meta", "br", "wbr", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """What a page holds; checks that its elements are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.mark.parametrize(("count", "seeds"), [(1, 3), (3, 1), (8, 3)])
def test_a_page_has_its_parts(count: int, seeds: int) -> None:
    page = Page(render_page(several(count, seeds, budget=Budget(max_ms=19.5), command="mixlab compare x --y")))
    labels = [drawing["aria-label"] for drawing in page.all("svg") if drawing.get("role") == "img"]
    assert len(labels) == 6
    assert all(labels)
    assert len(page.all("tr")) == 1 + count
    assert {head["scope"] for head in page.all("th")} == {"col", "row"}
    assert "mixlab compare x --y" in page.text
    assert ("± " in page.text) == (seeds > 1)
    assert ("best" in {cell.get("class") for cell in page.all("td")}) == (count > 1)


@functools.cache
def crowded() -> str:
    return render_page(several(10, 3))


def test_ids_are_unique_and_references_meet_them() -> None:
    text = crowded()
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(set(ids)) == len(ids)
    assert set(re.findall(r'(?:url\(|href=")#([^")]+)', text)) <= set(ids)


def test_nothing_is_loaded_from_elsewhere() -> None:
    text = crowded()
    assert not re.search(r"https?://|@import|<link|<img|\bsrc=", text)


def test_colors_come_from_the_style_sheet() -> None:
    body = crowded().partition("</style>")[2]
    assert "#0102" not in body
    assert "#0101" not in body
    assert "var(--series-9)" in body


def test_names_are_escaped() -> None:
    odd = "<script>alert(\"1\")</script> & $x_1$ 'quoted'"
    whole = comparison(model(odd, 97.0), model("b", 96.0), title=odd, data=odd, machine={odd: odd})
    page = Page(render_page(whole))
    assert len(page.all("script")) == 1
    assert page.text.count(odd) >= 5
    assert odd in {row.get("data-value") for row in page.all("th")}


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    write_page(several(3, 3), tmp_path / "a.html")
    write_page(several(3, 3), tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


def test_the_users_matplotlib_settings_change_nothing() -> None:
    import matplotlib

    before = render_page(several(2, 1))
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30, "svg.fonttype": "path"}):
        assert render_page(several(2, 1)) == before


def test_what_is_missing_is_left_out() -> None:
    bare: dict[str, Any] = {"curves": (), "latency_ms": None, "peak_mb": None, "images_per_second": None}
    page = Page(render_page(comparison(model("a", 97.0, **bare), model("b", **bare))))
    assert next(drawing for drawing in page.all("svg") if drawing.get("role"))["aria-label"]
    assert "Learning curves" not in page.text
    assert "latency" not in page.text.partition("Accuracy against cost")[2]


def test_no_model_fits() -> None:
    page = Page(render_page(several(2, 1, budget=Budget(max_ms=1.0))))
    assert "No model fits the budget of 1 ms latency." in page.text
    assert "recommended" not in page.text


@pytest.mark.parametrize(("library", "name"), [("matplotlib", "matplotlib"), ("jinja2", "Jinja2")])
def test_a_missing_library_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, library: str, name: str, tmp_path: Path
) -> None:
    def without(module: str) -> Any:
        if module.partition(".")[0] == library:
            raise ImportError(module)
        return builtins.__import__(module, fromlist=["x"])

    monkeypatch.setattr("importlib.import_module", without)
    with pytest.raises(MixlabError, match=rf"{name}.*pip install 'mixlab\[train\]'"):
        write_page(several(1, 1), tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MixlabError, match="Cannot write"):
        write_page(several(1, 1), tmp_path / "none" / "page.html")
