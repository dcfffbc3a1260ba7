"""The server answers what `mixlab predict` answers, refuses the rest with a reason, and goes on."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mixlab
from mixlab.core.errors import ConfigError, MixlabError
from mixlab.evals.quality.accuracy import predict
from mixlab.models.backbone import Backbone
from tests.deploy.uploads import EPS, FORM, bomb, encoded, form, photo, png, truncated_jpeg

pytest.importorskip("fastapi")

from starlette.testclient import TestClient

from mixlab.deploy.serve import create_app

NAMES = tuple(f"class {number}" for number in range(7))
HERE = "http://127.0.0.1"


def small_model() -> Backbone:
    model = mixlab.create_model("caformer_pico", num_classes=len(NAMES), image_size=32)
    model.class_names = NAMES
    return model.eval()


@pytest.fixture(scope="module")
def model() -> Backbone:
    torch.manual_seed(0)
    return small_model()


@pytest.fixture(scope="module")
def client(model: Backbone) -> Iterator[TestClient]:
    with TestClient(create_app(model), base_url=HERE) as client:
        yield client


def send(client: TestClient, body: bytes, kind: str = FORM, query: str = "") -> Any:
    return client.post(f"/predict{query}", content=body, headers={"content-type": kind})


def scores(answer: Any) -> list[list[tuple[str, float]]]:
    assert answer.status_code == 200, answer.text
    return [[(one["name"], one["score"]) for one in image["classes"]] for image in answer.json()["results"]]


# -- right answers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("JPEG", {"quality": 90}),
        ("WEBP", {}),
        ("GIF", {}),
        ("BMP", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
    ],
)
def test_an_image_of_any_format_gets_the_scores_of_mixlab_predict(
    model: Backbone, client: TestClient, tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    data = encoded(photo(1, 90, 56), kind, **options)
    (tmp_path / "image").write_bytes(data)
    (told,) = predict(model, [tmp_path / "image"])
    (found,) = scores(send(client, form(data)))
    assert [name for name, _ in found] == list(told.classes)
    assert [score for _, score in found] == pytest.approx(told.probabilities, abs=1e-6)


def test_an_image_that_lies_on_its_side_is_turned_as_predict_turns_it(
    model: Backbone, client: TestClient, tmp_path: Path
) -> None:
    image = photo(2, 96, 48)
    image.getexif()[0x0112] = 6
    data = encoded(image, "JPEG", exif=image.getexif())
    (tmp_path / "image.jpg").write_bytes(data)
    (told,) = predict(model, [tmp_path / "image.jpg"])
    answer = send(client, form(data))
    assert [score for _, score in scores(answer)[0]] == pytest.approx(told.probabilities, abs=1e-6)
    assert (answer.json()["results"][0]["width"], answer.json()["results"][0]["height"]) == (48, 96)


def test_a_bare_image_gets_the_answer_of_a_form(client: TestClient) -> None:
    assert scores(send(client, png(3), "image/png")) == scores(send(client, form(png(3))))


def test_top_says_how_many_classes(client: TestClient) -> None:
    few, all_of_them = (scores(send(client, form(png(3)), query=f"?top={top}"))[0] for top in (2, 10**6))
    assert few == all_of_them[:2]
    assert {name for name, _ in all_of_them} == set(NAMES)
    assert sum(score for _, score in all_of_them) == pytest.approx(1, abs=1e-5)


def test_many_images_of_many_requests_are_batched_and_answered_in_order(model: Backbone, tmp_path: Path) -> None:
    paths = []
    for number in range(24):
        paths.append(tmp_path / f"{number}.png")
        paths[-1].write_bytes(png(number, 40 + number))
    told = [one.probabilities for one in predict(model, paths)]
    with TestClient(create_app(model, batch=8, wait_ms=500), base_url=HERE) as client, ThreadPoolExecutor(8) as threads:
        bodies = [form(*(path.read_bytes() for path in paths[start : start + 3])) for start in range(0, 24, 3)]
        found = [row for answer in threads.map(lambda body: send(client, body), bodies) for row in scores(answer)]
        batches = client.app.state.service.metrics.batches  # type: ignore[attr-defined]
    for expected, row in zip(told, found, strict=True):
        assert [score for _, score in row] == pytest.approx(expected, abs=1e-5)
    assert batches.total == 24
    assert batches.count <= 12


def test_the_activation_map_covers_what_the_model_sees(client: TestClient) -> None:
    import base64
    from io import BytesIO

    import numpy as np
    from PIL import Image

    (seen,) = send(client, form(png(4, 120, 60)), query="?cam=true").json()["results"]
    assert seen["cam"]["name"] == seen["classes"][0]["name"]
    left, top, right, bottom = seen["cam"]["box"]
    assert right - left == pytest.approx(bottom - top, rel=0.05)
    assert left + right == pytest.approx(120, abs=2)
    assert 0 <= top < bottom <= 60
    image = Image.open(BytesIO(base64.b64decode(seen["cam"]["png"].partition(",")[2])))
    values = np.asarray(image)
    assert image.mode == "P"
    assert values.shape == (32, 32)
    assert values.max() > values.min()


def test_an_ensemble_answers_like_predict_and_shows_a_map(tmp_path: Path) -> None:
    from mixlab.models.ensemble import Ensemble

    both = Ensemble([small_model(), small_model()]).eval()
    (tmp_path / "image.png").write_bytes(png(5))
    (told,) = predict(both, [tmp_path / "image.png"])
    with TestClient(create_app(both), base_url=HERE) as client:
        answer = send(client, form(png(5)), query="?cam=true")
    assert [score for _, score in scores(answer)[0]] == pytest.approx(told.probabilities, abs=1e-6)
    assert answer.json()["results"][0]["cam"]["png"].startswith("data:image/png;base64,")


# -- refusals ------------------------------------------------------------------------------------

GOOD, TINY = png(0), png(0, 8, 8)
BAD: dict[str, tuple[bytes, str, int, str]] = {
    "no image": (form(b"these are words"), FORM, 422, "not an image"),
    "empty file": (form(b""), FORM, 422, "empty"),
    "truncated JPEG": (form(truncated_jpeg()), FORM, 422, "truncated"),
    "bomb": (form(bomb()), FORM, 413, "10000 x 10000"),
    "bare bomb": (bomb(), "image/png", 413, "10000 x 10000"),
    "bomb beyond Pillow's limit": (bomb(20_000), "image/png", 413, "pixels"),
    "ten thousand files": (form(*[TINY] * 10_000), FORM, 413, "More than 32 images"),
    "a program": (form(EPS), FORM, 422, "not an image"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml", 415, "image/png"),
    "JSON": (b"{}", "application/json", 415, "multipart/form-data"),
    "no type": (GOOD, "", 415, "multipart/form-data"),
    "form of text": (form(GOOD, kind="text/html"), FORM, 415, "declared"),
    "other field": (form(GOOD, field="file"), FORM, 422, "'files'"),
    "no files": (b"--between--\r\n", FORM, 422, "no image"),
    "no boundary": (form(GOOD), "multipart/form-data", 400, "boundary"),
    "wrong boundary": (form(GOOD), "multipart/form-data; boundary=other", 400, "malformed"),
    "body cut off": (form(GOOD)[:-20], FORM, 400, "last boundary"),
    "elongated": (form(png(0, 8 * 2000, 8)), FORM, 422, "factor"),
    "too many bytes": (form(*[bytes(2**20)] * 21), FORM, 413, "bytes"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused_with_a_reason_and_the_next_one_served(client: TestClient, case: str) -> None:
    body, kind, status, words = BAD[case]
    answer = send(client, body, kind)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["detail"]
    assert send(client, form(GOOD)).status_code == 200


def test_one_bad_image_among_good_ones_is_named(client: TestClient) -> None:
    answer = send(client, form(GOOD, truncated_jpeg(), GOOD))
    assert (answer.status_code, answer.json()["image"]) == (422, 2)
    assert answer.json()["detail"].startswith("Image 2 of 3: ")


@pytest.mark.parametrize("name", ["../../../etc/passwd", "/etc/passwd", "C:\\x", "a\x00b", "%2e%2e%2f", "x" * 3000])
def test_names_of_files_do_nothing_and_are_not_sent_back(client: TestClient, name: str) -> None:
    answer = send(client, form(GOOD, name=name))
    assert answer.status_code == 200
    assert name not in answer.text


@pytest.mark.parametrize("query", ["?top=0", "?top=many", "?cam=perhaps", "?tops=3"])
def test_a_query_that_does_not_fit_is_explained(client: TestClient, query: str) -> None:
    answer = send(client, form(GOOD), query=query)
    assert answer.status_code == 422
    assert query[1:4] in answer.json()["detail"]


@settings(max_examples=60, deadline=None)
@given(
    data=st.binary(max_size=400), start=st.sampled_from([b"", GOOD[:40], GOOD[:-30], truncated_jpeg()[:300], b"II*\0"])
)
def test_no_bytes_break_the_server(client: TestClient, data: bytes, start: bytes) -> None:
    assert send(client, start + data, "image/png").status_code in (200, 413, 422)
    assert send(client, start + data).status_code in (400, 422)


def test_a_bomb_is_refused_without_being_decoded(client: TestClient) -> None:
    import resource

    send(client, form(GOOD))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    send(client, BAD["bare bomb"][0], "image/png")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000  # kB; decoded it would be 100,000


def test_nothing_is_written_to_disk(client: TestClient) -> None:
    """Starlette's own forms go to a temporary file above 1 MB; these are 6."""
    large = encoded(photo(0, 1600, 1200).effect_spread(400))
    assert len(large) > 2 * 2**20
    written: list[str] = []
    watching = True

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and set(str(arguments[1])) & set("wax+"):
            written.append(str(arguments[0]))

    sys.addaudithook(watch)
    try:
        answer = send(client, form(large, large))
    finally:
        watching = False
    assert answer.status_code == 200
    assert written == []


# -- who may call --------------------------------------------------------------------------------


def test_a_token_is_needed_where_one_is_set(model: Backbone) -> None:
    with TestClient(create_app(model, token="open-sesame"), base_url="http://example.org") as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic open-sesame"}):
            answer = client.post("/predict", content=GOOD, headers={"content-type": "image/png", **headers})
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert client.get("/metrics", headers=headers).status_code == 401
        client.headers["authorization"] = "Bearer open-sesame"
        assert send(client, GOOD, "image/png").status_code == 200
        del client.headers["authorization"]
        assert client.get("/").status_code == client.get("/healthz").status_code == 200


def test_a_name_that_was_rebound_to_this_machine_is_not_answered(client: TestClient) -> None:
    for host, status in (("evil.example", 421), ("localhost:8000", 200), ("[::1]:8000", 200), ("127.0.0.1", 200)):
        assert client.get("/about", headers={"host": host}).status_code == status


@pytest.mark.parametrize("token", ["", "two words", "clé"])
def test_a_token_that_no_header_can_carry_is_an_error(model: Backbone, token: str) -> None:
    with pytest.raises(ConfigError, match="token"):
        create_app(model, token=token)


# -- load ----------------------------------------------------------------------------------------


def until(event: threading.Event) -> Callable[..., None]:
    """A hook that holds a model back."""

    def hook(*_: object) -> None:
        assert event.wait(20)

    return hook


def test_more_work_than_fits_is_turned_away_for_now() -> None:
    slow, go_on = small_model(), threading.Event()
    app = create_app(slow, queue=2, max_images=2)
    with TestClient(app, base_url=HERE) as client, ThreadPoolExecutor(1) as thread:
        slow.register_forward_pre_hook(until(go_on))
        first = thread.submit(send, client, form(GOOD, GOOD))
        while not app.state.service.waiting:
            pass
        answer = send(client, form(GOOD))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "2 images wait" in answer.json()["detail"]
        assert "mixlab_queue_images 2" in client.get("/metrics").text
        go_on.set()
        assert first.result().status_code == 200
        assert send(client, form(GOOD)).status_code == 200


def test_a_request_that_waits_too_long_is_given_up() -> None:
    slow, go_on = small_model(), threading.Event()
    with TestClient(create_app(slow, timeout=0.3, wait_ms=1), base_url=HERE) as client:
        hook = slow.register_forward_pre_hook(until(go_on))
        answer = send(client, form(GOOD))
        assert answer.status_code == 503
        assert "0.3 seconds" in answer.json()["detail"]
        go_on.set()
        hook.remove()
        assert send(client, form(GOOD)).status_code == 200


def test_large_bodies_of_many_requests_share_one_room(client: TestClient) -> None:
    room = client.app.state.service.room  # type: ignore[attr-defined]
    assert room.held == 0
    room.take(room.most)
    assert send(client, form(GOOD)).status_code == 503
    room.give_back(room.most)
    assert send(client, form(GOOD)).status_code == 200
    assert room.held == 0


def test_a_model_that_fails_is_500_without_its_words_and_the_next_request_is_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = small_model()

    def fail(*_: object) -> None:
        raise RuntimeError("secret words")

    with TestClient(create_app(broken), base_url=HERE) as client:
        hook = broken.register_forward_pre_hook(fail)
        answer = send(client, form(GOOD))
        hook.remove()
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert "secret words" in caplog.text
        assert send(client, form(GOOD)).status_code == 200


def test_metrics_count_requests_by_status_and_images_by_batch(model: Backbone) -> None:
    with TestClient(create_app(model), base_url=HERE) as client:
        send(client, form(GOOD, GOOD))
        send(client, b"", "text/plain")
        client.get("/nowhere")
        lines = client.get("/metrics").text.splitlines()
    assert 'mixlab_requests_total{path="/predict",method="POST",status="200"} 1' in lines
    assert 'mixlab_requests_total{path="/predict",method="POST",status="415"} 1' in lines
    assert 'mixlab_requests_total{path="other",method="GET",status="404"} 1' in lines
    assert "mixlab_predict_seconds_count 2" in lines
    assert "mixlab_batch_images_sum 2" in lines


# -- the rest ------------------------------------------------------------------------------------


def test_the_page_asks_nobody_but_its_own_server(client: TestClient) -> None:
    import base64
    import hashlib
    import re

    answer = client.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert re.findall(r"(?:src|href)=\"(?!data:)", answer.text) == []
    assert "http" not in answer.text
    for tag in ("style", "script"):
        (own,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.S)
        assert f"'sha256-{base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()}'" in policy


def test_an_unknown_path_and_method_are_explained_like_other_errors(client: TestClient) -> None:
    for answer, status in ((client.get("/x"), 404), (client.get("/predict"), 405), (client.get("/docs"), 404)):
        assert answer.status_code == status
        assert set(answer.json()) == {"detail", "image"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_pixels": 10**9}, "max_pixels"),
        ({"max_images": 0}, "max_images"),
        ({"timeout": 0}, "timeout"),
        ({"batch": 0}, "batch"),
        ({"wait_ms": -1}, "wait_ms"),
        ({"queue": 3, "max_images": 4}, "queue"),
    ],
)
def test_limits_that_make_no_sense_are_errors(model: Backbone, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        create_app(model, **options)


def test_a_backbone_without_classes_is_not_served() -> None:
    with pytest.raises(ConfigError, match="no classifier"):
        create_app(mixlab.create_model("caformer_pico", num_classes=0))


def test_a_missing_library_is_named_with_what_installs_it(model: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MixlabError, match=r"uvicorn: pip install 'mixlab\[serve\]'"):
        create_app(model)


def test_the_description_is_valid_and_names_every_status(client: TestClient) -> None:
    told = client.get("/openapi.json").json()
    assert set(told["paths"]["/predict"]["post"]["responses"]) == {
        str(status) for status in (200, 400, 408, 413, 415, 421, 422, 500, 503)
    }
    assert json.dumps(told).count("HTTPValidationError") == 0
