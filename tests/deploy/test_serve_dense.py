"""Segmenters and detectors behind the server see what `mixlab predict` sees."""

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mixlab
from mixlab.data.object_transforms import restored
from mixlab.dense.detector import create_detector
from mixlab.dense.segmentation import segment
from mixlab.dense.segmenter import Segmenter, create_segmenter
from mixlab.evals.quality.dense import detect, seen, seen_pixels
from tests.deploy.uploads import FORM, encoded, form, photo, png, truncated_jpeg

pytest.importorskip("fastapi")

from starlette.testclient import TestClient

from mixlab.deploy.serve import create_app

NAMES = ("background", "cat", "dog")
SMALL = {"width": 16, "head_width": 16}


def pixels(uri: str) -> np.ndarray[Any, Any]:
    image = Image.open(BytesIO(base64.b64decode(uri.partition(",")[2])))
    assert image.mode in ("P", "1")
    return np.asarray(image)


def ask(app: Any, body: bytes, query: str) -> Any:
    with TestClient(app, base_url="http://127.0.0.1") as client:
        answer = client.post(f"/predict{query}", content=body, headers={"content-type": FORM})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def segmenter(tmp_path: Path) -> Path:
    model = create_segmenter("caformer_pico", num_classes=3, width=16, image_size=48, auxiliary_weight=0.0)
    model.class_names = NAMES
    mixlab.save_weights(model, tmp_path / "segmenter.safetensors")
    return tmp_path / "segmenter.safetensors"


def test_a_segmenter_gives_shares_and_the_mask_at_the_images_size(segmenter: Path) -> None:
    from mixlab.dense.files import load_dense

    model = load_dense(segmenter).eval()
    assert isinstance(model, Segmenter)
    image = photo(1, 80, 56)
    told = ask(create_app(segmenter), form(encoded(image), png(2)), "?mask=true")
    assert (told["task"], len(told["results"])) == ("segmentation", 2)
    found = told["results"][0]
    expected = seen_pixels(model, image)[1]["classes"]
    assert {row["name"]: row["share"] for row in found["classes"]} == pytest.approx(expected)
    assert np.array_equal(pixels(found["mask"]), segment(model, image))


def test_a_bad_image_for_a_segmenter_is_named(segmenter: Path) -> None:
    with TestClient(create_app(segmenter), base_url="http://127.0.0.1") as client:
        body = form(png(1), truncated_jpeg())
        answer = client.post("/predict", content=body, headers={"content-type": FORM})
        assert (answer.status_code, answer.json()["image"]) == (422, 2)
        assert client.post("/predict?top=3", content=body, headers={"content-type": FORM}).status_code == 422


@pytest.mark.parametrize("masks", [True, False])
def test_a_detector_gives_the_objects_and_masks_that_predict_draws(masks: bool) -> None:
    torch.manual_seed(1)
    options: dict[str, Any] = {
        "width": 16,
        "head_width": 16,
        "shorter": 64,
        "longer": 96,
        "detections": 5,
        "proposals": 20,
    }
    model = create_detector("caformer_pico", num_classes=2, masks=masks, score_threshold=0.0, **options).eval()
    model.class_names = NAMES[1:]
    image = photo(3, 100, 70)
    told = ask(create_app(model), form(encoded(image)), "?threshold=0&masks=true")
    expected = seen(model, image, 0.0)[1]["objects"]
    found = told["results"][0]["objects"]
    assert len(found) == len(expected) > 0
    assert [one["score"] for one in found] == pytest.approx(sorted((one["score"] for one in expected), reverse=True))
    boxes = sorted(tuple(round(side, 2) for side in one["box"]) for one in found)
    assert boxes == sorted(tuple(round(side, 2) for side in one["box"]) for one in expected)
    if not masks:
        assert all(one["mask"] is None for one in found)
        return
    kept = restored(*detect(model, image, 0.0))
    drawn = sum(pixels(one["mask"]).astype(int) for one in found)
    assert np.array_equal(drawn, kept["masks"].numpy().astype(int).sum(0))


def test_objects_below_the_threshold_are_left_out() -> None:
    options: dict[str, Any] = {
        "width": 16,
        "head_width": 16,
        "shorter": 64,
        "longer": 96,
        "score_threshold": 0.0,
        "masks": False,
    }
    model = create_detector("caformer_pico", num_classes=2, **options).eval()
    body = form(png(3))
    everything = ask(create_app(model), body, "?threshold=0")["results"][0]["objects"]
    limit = sorted(one["score"] for one in everything)[len(everything) // 2]
    some = ask(create_app(model), body, f"?threshold={limit}")["results"][0]["objects"]
    assert [one["score"] for one in some] == [one["score"] for one in everything if one["score"] >= limit]


def test_long_thin_images_are_no_trouble_for_dense_models(segmenter: Path) -> None:
    options: dict[str, Any] = {**SMALL, "shorter": 64, "longer": 96, "masks": False}
    detector = create_detector("caformer_pico", num_classes=2, **options)
    for model in (segmenter, detector):
        told = ask(create_app(model), form(encoded(photo(0, 800, 8)), encoded(photo(0, 8, 800))), "")
        assert [one["width"] for one in told["results"]] == [800, 8]
