"""Public checkpoints: the rows are true, and the way from a row to a model holds."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch

import mixlab
import mixlab.hub.timm
from mixlab.core.errors import ConfigError, HubError, WeightsError
from mixlab.models import released
from mixlab.models.layouts import layouts
from mixlab.models.released import Release, download, fetch, find_release, releases, sha256_of
from mixlab.models.zoo import model_config, rows
from tests.golden import fill
from tests.golden.offered import offered
from tests.hub_server import Hub, running_hub

ROWS = [release for tags in releases().values() for release in tags.values()]
TIMMS_CROPS = {"coat lite": 0.9, "coat parallel": 0.9, "vision_lstm vit": 0.9}  # the authors evaluate at 0.875
OF_TIMM = [release for release in ROWS if release.repository.startswith("timm/")]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setenv("MIXLAB_CACHE", str(tmp_path / "own"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        yield server


def at(server: Hub, content: bytes, **changes: Any) -> Release:
    """A row whose file is on this machine's server."""
    server.files["/x.pth"] = content
    base = find_release("coat_lite_tiny", "released:ucsd_in1k")
    return replace(base, **{"url": f"{server.address}/x.pth", "file": "x.pth", "sha256": "", **changes})


# -- the rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", OF_TIMM, ids=lambda release: release.repository)
def test_rows_of_timm_agree_with_its_own_registry(release: Release) -> None:
    about = timm.models.get_pretrained_cfg(release.repository.removeprefix("timm/"))
    assert about.hf_hub_id == release.repository
    assert about.input_size == (3, release.image_size, release.image_size)
    assert about.num_classes == release.num_classes
    assert about.license == release.license
    own = model_config(release.model).preprocessing
    assert about.crop_pct == (release.crop or TIMMS_CROPS.get(release.layout, own.crop))
    assert (about.mean, about.std, about.interpolation) == (own.mean, own.std, own.interpolation)


def test_timm_releases_nothing_of_our_models_that_is_not_listed() -> None:
    names = [name for name in rows() if timm.is_model(name)]
    theirs = {cfg for name in names for cfg in timm.list_models(f"{name}.*", pretrained=True)}
    assert {f"timm/{name}" for name in theirs} <= {release.repository for release in OF_TIMM}
    assert len(theirs) > 40


def test_rows_name_models_layouts_and_public_addresses() -> None:
    assert len({(release.repository, release.url, release.file) for release in ROWS}) == len(ROWS)
    for release in ROWS:
        assert release.model in rows()
        assert release.layout in layouts()
        assert release.address.startswith("https://")
        assert "." not in release.tag  # timm splits names there
        assert release.top1 is None or 70 < release.top1 < 90
        digits = re.search(r"_([0-9a-f]{8})\.pth$", release.url)
        assert release.sha256 == (digits[1] if digits else "")


def test_accuracies_are_those_of_the_papers() -> None:
    """But CoaT's page states its own runs, MetaFormer's another figure for one model, and one file is a shorter run."""
    differing, compared = {("randformer_s24", "sail_in1k"), ("vil_tiny", "e400_in1k")}, 0
    for release in ROWS:
        config = model_config(release.model)
        if config.family == "coat" or (release.model, release.tag) in differing or release.top1 is None:
            continue
        pretraining = None if release.data == "imagenet-1k" else "imagenet-21k"
        told = [
            row.top1
            for row in config.reported
            if (row.image_size, row.pretraining) == (release.image_size, pretraining)
        ]
        assert release.top1 in told, release
        compared += 1
    assert compared > 60


def test_timm_knows_every_row_by_its_tag() -> None:
    listed = timm.list_models("mixlab_*", pretrained=True)
    assert sorted(listed) == sorted(f"mixlab_{release.model}.{release.tag}" for release in ROWS)


# -- from a row to a model -----------------------------------------------------------------------


def test_released_weights_are_fetched_verified_and_converted(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = timm.create_model("poolformerv2_s12").eval()
    hub.put("timm/poolformerv2_s12.sail_in1k", "model.safetensors", safetensors.torch.save(peer.state_dict()))
    model = mixlab.create_model("poolformerv2_s12", weights="released").eval()
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = peer(image)
        assert (model(image) - expected).abs().max() < 1e-4 * expected.std()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    again = mixlab.create_model("poolformerv2_s12", weights="released:sail_in1k", num_classes=4)  # from the cache
    assert again.config.num_classes == 4
    assert torch.equal(again.get_parameter("stem.conv.weight"), model.get_parameter("stem.conv.weight"))
    (blob,) = (path for path in Path(fetch(find_release("poolformerv2_s12"))).resolve().parent.iterdir())
    blob.write_bytes(blob.read_bytes()[:-1] + b"\x07")
    with pytest.raises(HubError, match="sha256"):
        mixlab.create_model("poolformerv2_s12", weights="released")


def test_a_row_brings_its_size_and_classes() -> None:
    assert find_release("caformer_s18", "released:sail_in1k_384").overrides == {"image_size": 384, "num_classes": 1000}
    assert find_release("caformer_s18", "released:sail_in22k").overrides["num_classes"] == 21841
    assert find_release("deit3_small").overrides["preprocessing"] == {"crop": 0.9}
    assert model_config("deit3_small", **find_release("deit3_small").overrides).preprocessing.crop == 0.9
    assert find_release("caformer_s18").tag == "sail_in1k"


def test_a_file_that_was_put_there_by_hand_is_found(hub: Hub) -> None:
    peer = mixlab.create_model("identityformer_s12")
    release = find_release("identityformer_s12")
    release.local.parent.mkdir(parents=True)
    torch.save(peer.state_dict(), release.local)
    with pytest.warns(UserWarning, match="No hash is known"):
        model = mixlab.create_model("identityformer_s12", weights="released")
    assert torch.equal(model.get_parameter("head.classifier.weight"), peer.get_parameter("head.classifier.weight"))
    assert hub.asked == []


def test_the_files_that_nx_ai_offers_load_like_their_converted_form(tmp_path: Path) -> None:
    record = json.loads((Path(__file__).parents[1] / "golden" / "vil_tiny.json").read_text())
    converted = {key: torch.from_numpy(value) for key, value in fill.state_dict(record).items()}
    raw = {offered(key): value for key, value in converted.items()}
    torch.save({"state_dict": raw, "ctor_kwargs": {"dim": 192}}, tmp_path / "vil2.th")
    expected, model = mixlab.create_model("vil_tiny"), mixlab.create_model("vil_tiny", weights=tmp_path / "vil2.th")
    mixlab.load_weights(expected, converted)
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


# -- downloads from a plain address --------------------------------------------------------------


def test_a_download_is_kept_and_not_fetched_twice(hub: Hub) -> None:
    release = at(hub, b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    known = replace(release, sha256=digest[:8])
    path = fetch(known)
    assert path == release.local
    assert sha256_of(path) == digest
    fetch(known)
    assert hub.asked == ["/x.pth"]


def test_a_wrong_hash_leaves_nothing_behind(hub: Hub) -> None:
    release = at(hub, b"other weights", sha256="0123abcd")
    with pytest.raises(HubError, match="0123abcd"):
        fetch(release)
    assert list(release.local.parent.iterdir()) == []


def test_two_downloads_at_once_do_not_write_into_each_other(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the processes of one training run do: the second starts while the first is under way."""
    release = at(hub, b"w" * 1000)
    first = released.copy

    def copy(*arguments: Any) -> int:
        monkeypatch.setattr(released, "copy", first)
        download(release.url, release.local, release)
        assert release.local.read_bytes() == b"w" * 1000
        return first(*arguments)

    monkeypatch.setattr(released, "copy", copy)
    download(release.url, release.local, release)
    assert release.local.read_bytes() == b"w" * 1000
    assert list(release.local.parent.iterdir()) == [release.local]


def test_a_download_that_breaks_off_leaves_nothing_behind(hub: Hub) -> None:
    release = at(hub, b"w" * 1000)
    hub.cut.add("/x.pth")
    with pytest.raises(HubError, match="broke off after 500 of 1000"):
        fetch(release)
    assert list(release.local.parent.iterdir()) == []


def test_a_file_address_works_too(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"abc")
    download((tmp_path / "source").as_uri(), tmp_path / "folder" / "copy")
    assert (tmp_path / "folder" / "copy").read_bytes() == b"abc"
    with pytest.raises(HubError, match="Cannot fetch"):
        download("no address", tmp_path / "copy")


def test_a_missing_file_says_where_to_get_it_and_where_to_put_it(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    release = at(hub, b"")
    del hub.files["/x.pth"]
    with pytest.raises(HubError) as caught:
        fetch(release)
    for needed in ("Error 404", release.url, str(release.local), "create_model('coat_lite_tiny', weights=FILE)"):
        assert needed in str(caught.value)
    asked = len(hub.asked)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("vil_tiny", "caformer_s18"):
        with pytest.raises(HubError) as caught:
            mixlab.create_model(name, weights="released")
        assert find_release(name).address in str(caught.value)
        assert "HF_HUB_OFFLINE" in str(caught.value)
    assert len(hub.asked) == asked


def test_without_a_network_the_error_says_what_to_do(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    with pytest.raises(
        HubError, match=r"fetch http://127.0.0.1:9/timm/coat_tiny\.in1k/resolve/main/model\.safetensors"
    ):
        mixlab.create_model("coat_tiny", weights="released")


def test_a_checkpoint_of_another_model_does_not_fit(hub: Hub) -> None:
    other = safetensors.torch.save(timm.create_model("poolformerv2_s24").state_dict())
    hub.put("timm/poolformerv2_s12.sail_in1k", "model.safetensors", other)
    with pytest.raises(WeightsError, match="does not fit"):
        mixlab.create_model("poolformerv2_s12", weights="released")


@pytest.mark.parametrize(
    ("name", "weights", "told"),
    [
        ("vil_pico", "released", "No public checkpoint of 'vil_pico'"),
        ("caformer_s18", "released:sail_in21k", "sail_in22k"),
        (None, "released", "name of a single model"),
        ("ensemble_hpx_conv_s18", "released", "name of a single model"),
        ("caformer_s81", "released", "caformer_s18"),
    ],
)
def test_what_is_not_released_is_told(name: str | None, weights: str, told: str, hub: Hub) -> None:
    with pytest.raises(ConfigError, match=told):
        mixlab.create_model(name, weights=weights)


def test_a_wrong_option_is_told_before_the_download(hub: Hub) -> None:
    with pytest.raises(ConfigError, match="num_classes"):
        mixlab.create_model("poolformerv2_s12", weights="released", num_clases=3)
    assert hub.asked == []
