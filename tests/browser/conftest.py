from collections.abc import Iterator

import pytest

from tests.browser.chromium import NoChromium, find
from tests.browser.driver import Browser, open_browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    try:
        find()
    except NoChromium as error:
        pytest.skip(str(error))
    with open_browser() as opened:
        yield opened
