"""The server's page in a real browser: an image is dropped or chosen, and what the model sees is read off the page.

With MIXLAB_SHOTS=FOLDER in the environment, every state is also kept there as a picture.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import mixlab
from mixlab.dense.detector import create_detector
from mixlab.dense.segmenter import create_segmenter
from mixlab.evals.quality.accuracy import predict
from mixlab.models.backbone import Backbone
from tests.browser.driver import Browser, Page

pytest.importorskip("fastapi")

from mixlab.deploy.serve import serving

NAMES = tuple(f"kind {number}" for number in range(12))
SMALL = {"width": 16, "head_width": 16}
SHOWN = "!document.getElementById('found').hidden && !document.getElementById('found').hasAttribute('aria-busy')"
FAILED = "!document.getElementById('error').hidden"


@pytest.fixture(scope="module")
def model() -> Backbone:
    torch.manual_seed(0)
    model = mixlab.create_model("caformer_pico", num_classes=len(NAMES), image_size=64)
    model.class_names = NAMES
    return model.eval()


@pytest.fixture(scope="module")
def address(model: Backbone) -> Iterator[str]:
    with serving(model, max_bytes=2**20) as address:
        yield address


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real photograph, 640 x 427."""
    from sklearn.datasets import load_sample_image  # type: ignore[import-untyped]

    path = tmp_path_factory.mktemp("photos") / "china.jpg"
    Image.fromarray(load_sample_image("china.jpg")).save(path)
    return path


def wait(page: Page, script: str, seconds: float = 30) -> None:
    """Until it holds. Asked from outside: the page's policy lets nothing be evaluated inside."""
    until = time.monotonic() + seconds
    while not page.evaluate(script):
        assert time.monotonic() < until, f"{script}\n{page.text('main')}"
        page.raw.wait_for_timeout(50)


def move(slider: str, value: float, event: str) -> str:
    return f"(s => {{ s.value = {value}; s.dispatchEvent(new Event('{event}')) }})(document.getElementById('{slider}'))"


def keep(page: Page, name: str) -> None:
    if "MIXLAB_SHOTS" in os.environ:
        page.screenshot(Path(os.environ["MIXLAB_SHOTS"]) / f"serve-{name}.png")


@pytest.mark.parametrize("way", ["drop", "choose"])
def test_the_page_shows_the_classes_that_predict_names(
    browser: Browser, address: str, model: Backbone, photo: Path, way: str
) -> None:
    (told,) = predict(model, [photo])
    with browser.page(address + "/") as page:
        if way == "drop":
            page.drop_files("#drop", photo)
        else:
            page.set_files("#file", photo)
        wait(page, SHOWN)
        assert page.texts("#results .name") == list(told.classes)
        assert page.texts("#results .value") == [f"{100 * chance:.1f}%" for chance in told.probabilities]
        widths = page.evaluate(
            "[...document.querySelectorAll('#results .bar')].map(bar => parseFloat(bar.style.width))"
        )
        assert widths == pytest.approx([100 * chance for chance in told.probabilities], abs=0.01)
        assert "ms in the model" in page.text("#latency")
        keep(page, f"classes-{way}")
        assert page.errors == []
        assert {url.removeprefix(address).partition("?")[0] for url in page.requests} == {"/about", "/predict"}


def test_the_activation_map_lies_on_the_square_that_the_model_sees(browser: Browser, address: str, photo: Path) -> None:
    with browser.page(address + "/") as page:
        page.set_files("#file", photo)
        wait(page, SHOWN)
        wait(page, "document.querySelector('#overlay img').naturalWidth > 0")
        box, whole = (
            page.evaluate(f"(() => {{ const r = document.querySelector('{place}').getBoundingClientRect(); "
                          "return [r.left, r.top, r.width, r.height]; })()")
            for place in ("#overlay .seen", "#picture")
        )  # fmt: skip
        assert box[2] == pytest.approx(box[3], rel=0.02)
        assert box[0] + box[2] / 2 == pytest.approx(whole[0] + whole[2] / 2, abs=box[2] / 64)  # one pixel of the model
        assert box[3] <= whole[3]
        page.evaluate(move("opacity", 0, "input"))
        assert page.evaluate("getComputedStyle(document.getElementById('overlay')).opacity") == "0"


def test_errors_are_readable_and_the_next_image_is_shown(
    browser: Browser, address: str, photo: Path, tmp_path: Path
) -> None:
    words, large = tmp_path / "words.png", tmp_path / "large.bmp"
    words.write_text("these are words")
    Image.new("RGB", (700, 700)).save(large)
    with browser.page(address + "/", theme="dark") as page:
        page.set_files("#file", words)
        wait(page, FAILED)
        assert "not an image of a known format" in page.text("#error")
        keep(page, "error-dark")
        page.set_files("#file", large)
        wait(page, "document.getElementById('error').textContent.includes('MB')")
        assert "1.4 MB; this server takes up to 1 MB" in page.text("#error")
        page.drop_files("body", photo)
        wait(page, SHOWN)
        assert not page.visible("#error")
        keep(page, "classes-dark")


def test_a_phone_shows_everything_in_one_column(browser: Browser, address: str, photo: Path) -> None:
    with browser.page(address + "/", width=375, height=740, touch=True) as page:
        page.set_files("#file", photo)
        wait(page, SHOWN)
        assert page.overflow() == 0
        keep(page, "phone")


def test_a_stopped_server_is_named(browser: Browser, model: Backbone, photo: Path) -> None:
    with serving(model) as address, browser.page(address + "/") as page:
        wait(page, "document.getElementById('title').textContent !== 'Mixlab'")
        page.raw.context.set_offline(True)
        page.set_files("#file", photo)
        wait(page, FAILED)
        assert "does not answer" in page.text("#error")


def test_the_page_asks_for_the_token(browser: Browser, model: Backbone, photo: Path) -> None:
    with serving(model, token="open-sesame") as address, browser.page(address + "/") as page:
        wait(page, "!document.getElementById('key').hidden")
        keep(page, "token")
        assert not page.visible("#error")
        page.set_files("#file", photo)
        for given, then in (("wrong", FAILED), ("open-sesame", SHOWN)):
            page.raw.fill("#token", given)
            page.click("#key button")
            wait(page, "document.getElementById('token').value === ''")
            wait(page, then)
        assert len(page.texts("#results li")) == 5
        assert not page.visible("#key")


def test_a_segmenter_lays_its_mask_over_the_image(browser: Browser, photo: Path) -> None:
    torch.manual_seed(0)
    model = create_segmenter("caformer_pico", num_classes=4, width=16, image_size=96)
    model.class_names = ("background", "sky", "roof", "tree")
    with serving(model) as address, browser.page(address + "/") as page:
        page.set_files("#file", photo)
        wait(page, SHOWN)
        wait(page, "document.querySelector('#overlay img').naturalWidth === 640")
        assert set(page.texts("#results .name")) <= set(model.class_names)
        assert sum(float(text.rstrip("%")) for text in page.texts("#results .value")) == pytest.approx(100, abs=0.3)
        keep(page, "segmenter")
        assert page.errors == []


def test_a_detector_draws_its_boxes_and_the_least_score_can_be_moved(browser: Browser, photo: Path) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "width": 16,
        "head_width": 16,
        "shorter": 96,
        "longer": 160,
        "score_threshold": 0.0,
        "detections": 8,
    }
    model = create_detector("caformer_pico", num_classes=3, **options).eval()
    with serving(model) as address, browser.page(address + "/") as page:
        page.evaluate(move("threshold", 0.05, "input"))
        page.set_files("#file", photo)
        wait(page, SHOWN)
        count = len(page.texts("#results li"))
        assert count == page.evaluate("document.querySelectorAll('#overlay .box').length") > 0
        assert page.evaluate("document.querySelectorAll('#overlay > img').length") == count
        keep(page, "detector")
        page.evaluate(
            "const t = document.getElementById('threshold'); t.value = 0.95; t.dispatchEvent(new Event('change'))"
        )
        wait(page, "document.querySelectorAll('#overlay .box').length === 0")
        assert "Nothing" in page.text("#caption")
        assert page.errors == []
