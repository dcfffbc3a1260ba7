"""Pages in a real browser: what they log, what they ask the network for, and what happens on clicks and keys.

with open_browser() as browser, browser.page(Path("report.html"), width=375) as page:
    page.click("thead button")
    assert not page.errors and not page.requests
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from tests.browser.chromium import environment, find

TALLEST = 16_000  # pixels; a drawing above 16,384 fails
NO_REQUEST = ("data:", "blob:", "about:")


class Page:
    """One open page. `errors` and `requests` grow while it lives; `requests` leaves out the page itself."""

    def __init__(self, page: Any, address: str) -> None:
        self.raw, self.address = page, address  # `raw` is Playwright's page, for what is not here
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.errors.append(message.text) if message.type in BAD else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.note(request.url))

    def note(self, url: str) -> None:
        if not url.startswith(NO_REQUEST) and re.sub("#.*", "", url) != self.address:
            self.requests.append(url)

    def evaluate(self, script: str, argument: Any = None) -> Any:
        """The value of an expression or of a function `(argument) => ...`, as plain data."""
        return self.raw.evaluate(script, argument)

    def click(self, selector: str) -> None:
        self.raw.click(selector)

    def tap(self, selector: str) -> None:
        """Needs a page with `touch`."""
        self.raw.tap(selector)

    def hover(self, selector: str) -> None:
        self.raw.hover(selector)

    def focus(self, selector: str) -> None:
        self.raw.focus(selector)

    def press(self, *keys: str) -> None:
        """Into what has the focus: "Tab", "Enter", "ArrowRight", "Shift+Tab", ..."""
        for key in keys:
            self.raw.keyboard.press(key)

    def choose(self, selector: str, value: str) -> None:
        """An option of a <select>."""
        self.raw.select_option(selector, value)

    def set_files(self, selector: str, *paths: str | PathLike[str]) -> None:
        """As if a person had chosen files for an <input type=file>."""
        self.raw.set_input_files(selector, [str(path) for path in paths])

    def drop_files(self, selector: str, *paths: str | PathLike[str]) -> None:
        """As if a person had dragged files onto an element."""
        files = [{"name": Path(path).name, "content": list(Path(path).read_bytes())} for path in paths]
        script = """([target, files]) => {
          const held = new DataTransfer();
          for (const { name, content } of files) held.items.add(new File([new Uint8Array(content)], name));
          for (const type of ["dragenter", "dragover", "drop"])
            target.dispatchEvent(new DragEvent(type, { bubbles: true, cancelable: true, dataTransfer: held }));
        }"""
        self.raw.evaluate(script, [self.raw.query_selector(selector), files])

    def text(self, selector: str) -> str:
        """Of the first match, as it is seen."""
        return str(self.raw.inner_text(selector))

    def texts(self, selector: str) -> list[str]:
        return [str(text) for text in self.raw.locator(selector).all_inner_texts()]

    def visible(self, selector: str) -> bool:
        return bool(self.raw.is_visible(selector))

    def wait_for(self, script: str, argument: Any = None, *, seconds: float = 20) -> None:
        """Until an expression or a function of `argument` holds."""
        self.raw.wait_for_function(script, arg=argument, timeout=1000 * seconds)

    def resize(self, width: int, height: int) -> None:
        self.raw.set_viewport_size({"width": width, "height": height})

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        return int(self.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def screenshot(self, path: str | PathLike[str], *, whole: bool = True) -> None:
        """Of the window, or of the whole page as far down as Chromium can draw at once."""
        size = self.evaluate("[document.documentElement.clientWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": min(size[1], TALLEST)} if whole else None
        self.raw.screenshot(path=str(path), full_page=whole, clip=clip)

    def print_to(self, path: str | PathLike[str]) -> None:
        """A PDF on A4, as a printer would get it."""
        self.raw.pdf(path=str(path), format="A4")


BAD = ("error", "warning")


class Browser:
    def __init__(self, browser: Any) -> None:
        self.browser = browser

    @contextmanager
    def page(
        self,
        place: str | PathLike[str],
        *,
        width: int = 1280,
        height: int = 900,
        theme: str = "light",
        touch: bool = False,
    ) -> Iterator[Page]:
        """A file, or an address that starts with http, in a window of its own with nothing kept from others."""
        address = place if isinstance(place, str) and place.startswith("http") else Path(place).resolve().as_uri()
        context = self.browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, has_touch=touch, service_workers="block"
        )
        try:
            page = Page(context.new_page(), address)
            page.raw.goto(address, wait_until="load")
            yield page
        finally:
            context.close()


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Raises `NoChromium` where there is none."""
    program = find()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as library:
        browser = library.chromium.launch(executable_path=str(program), env=dict(environment(program)))
        try:
            yield Browser(browser)
        finally:
            browser.close()
