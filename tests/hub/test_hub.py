"""Folders and repositories that hold a model, and back."""

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import mixlab
import mixlab.hub.timm
from mixlab.core.errors import ConfigError, HubError, MixlabError
from mixlab.hub.hugging_face import as_folder
from mixlab.models.papers import papers
from mixlab.models.zoo import rows
from tests.hub_server import Hub, running_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server


@pytest.fixture
def model() -> mixlab.Backbone:
    made = mixlab.create_model("caformer_pico", num_classes=3).eval()
    made.class_names = ("cat", "dog", "owl")
    return made


def same(one: Any, other: Any, *, channels: int = 3, size: int = 32) -> bool:
    image = torch.randn(2, channels, size, size)
    with torch.no_grad():
        return torch.equal(one.eval()(image), other.eval()(image))


# -- folders -------------------------------------------------------------------------------------


def test_a_pushed_folder_loads_everywhere_and_answers_alike(model: mixlab.Backbone, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert mixlab.push_to_hub(model, folder) == str(folder)
    assert sorted(file.name for file in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    back = mixlab.from_hub(folder)
    assert isinstance(back, mixlab.Backbone)
    assert same(back, model)
    assert back.class_names == model.class_names
    assert same(mixlab.create_model(weights=folder / "model.safetensors"), model)
    other = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert same(other, model)
    assert other.class_names == model.class_names
    assert same(
        timm.create_model("mixlab_caformer_pico", num_classes=3, checkpoint_path=str(folder / "model.safetensors")),
        model,
    )


@pytest.mark.parametrize("channels", [1, 4])
def test_timm_rebuilds_what_differs_from_the_named_model(channels: int, tmp_path: Path) -> None:
    """Also more than three channels, where timm would draw a fresh first convolution for weights of its own kind."""
    model = mixlab.create_model(
        "caformer_pico",
        mixers=["pool", "sepconv", "mlstm", "attention"],
        in_channels=channels,
        image_size=(40, 48),
        num_classes=2,
        preprocessing={"mean": [0.4] * channels, "std": [0.3] * channels, "crop": 0.8},
    )
    mixlab.push_to_hub(model, tmp_path / "model")
    other = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True)
    assert other.config == model.config
    assert same(other, model, channels=channels)
    prepared = timm.data.resolve_model_data_config(other)
    assert prepared["crop_pct"] == 0.8
    assert tuple(prepared["input_size"]) == (channels, 40, 48)
    fresh = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True, num_classes=7).eval()
    image = torch.randn(1, channels, 40, 48)
    assert fresh(image).shape == (1, 7)
    assert torch.equal(fresh.embed(image), model.eval().embed(image))
    maps = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True, features_only=True).eval()(image)
    assert all(torch.equal(one, level) for one, level in zip(maps, model.pyramid(image), strict=True))


def test_a_model_that_timm_made_is_pushed_like_any(tmp_path: Path) -> None:
    model = timm.create_model("mixlab_vil_pico", num_classes=2, global_pool="avg")
    mixlab.push_to_hub(model, tmp_path)
    assert same(mixlab.from_hub(tmp_path), model)
    assert same(timm.create_model(f"local-dir:{tmp_path}", pretrained=True), model)


def test_overrides_change_the_classifier(model: mixlab.Backbone, tmp_path: Path) -> None:
    mixlab.push_to_hub(model, tmp_path)
    image = torch.randn(1, 3, 32, 32)
    other = mixlab.from_hub(tmp_path, num_classes=5)
    assert isinstance(other, mixlab.Backbone)
    assert other.config.num_classes == 5
    assert torch.equal(other.eval().embed(image), model.embed(image))


def test_segmenters_ensembles_and_detectors_travel_too(tmp_path: Path) -> None:
    segmenter = mixlab.create_segmenter("caformer_pico", num_classes=4).eval()
    mixlab.push_to_hub(segmenter, tmp_path / "dense")
    back = mixlab.from_hub(tmp_path / "dense").eval()
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(back(image), segmenter(image))
    assert "image-segmentation" in (tmp_path / "dense" / "README.md").read_text()
    with pytest.raises(ConfigError, match="num_classes"):
        mixlab.from_hub(tmp_path / "dense", num_classes=2)
    members = [mixlab.create_model("caformer_pico"), mixlab.create_model("convformer_pico")]
    ensemble = mixlab.Ensemble(members).eval()
    mixlab.push_to_hub(ensemble, tmp_path / "both")
    assert same(mixlab.from_hub(tmp_path / "both"), ensemble)
    assert "architecture" not in json.loads((tmp_path / "both" / "config.json").read_text())


# -- the card ------------------------------------------------------------------------------------


def test_the_card_says_what_it_is_how_to_load_it_and_whom_to_cite(model: mixlab.Backbone, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    mixlab.push_to_hub(
        model, tmp_path, metrics={"top-1 | test": 97.53, "note": "five\nseeds"}, licence='mit"\nx: y', data="our pets"
    )
    card = (tmp_path / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["license"] == 'mit"\nx: y'  # no text breaks out of its entry
    assert front["pipeline_tag"] == "image-classification"
    assert "| top-1 \\| test | 97.53 |" in card
    assert "| note | five seeds |" in card
    assert "| trained on | our pets |" in card
    assert papers()["metaformer"].bibtex in card
    assert str(tmp_path) not in card
    (block,) = re.findall(r"```python\n(.*?)```", card, re.S)
    lines = block.replace("path/to/this/folder", str(tmp_path))
    exec(compile(lines, "card", "exec"), {})  # the lines that it shows


def test_every_family_has_a_paper() -> None:
    assert {row["family"] for row in rows().values()} - {"ensembles"} == set(papers())


def test_a_card_that_is_there_stays(model: mixlab.Backbone, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    mixlab.push_to_hub(model, tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


# -- what goes wrong -----------------------------------------------------------------------------


def test_changed_weights_are_refused(model: mixlab.Backbone, tmp_path: Path) -> None:
    mixlab.push_to_hub(model, tmp_path)
    weights = tmp_path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(HubError, match="sha256"):
        mixlab.from_hub(tmp_path)
    weights.unlink()
    with pytest.raises(HubError, match="missing"):
        mixlab.from_hub(tmp_path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "not a readable"),
        ("[]", "no Mixlab model"),
        ('{"architecture": "caformer_s18"}', "weights='released'"),
        ('{"mixlab": {}}', "must name a weight file"),
        ('{"mixlab": {"weights": {"file": "../x", "sha256": "' + "0" * 64 + '"}}}', "must name a weight file"),
        ('{"mixlab": {"weights": {"file": "x", "sha256": "0"}}}', "must name a weight file"),
    ],
)
def test_a_config_that_is_not_ours_is_told(content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(HubError, match=told):
        mixlab.from_hub(tmp_path)


def test_places_that_cannot_be_are_told(model: mixlab.Backbone, tmp_path: Path) -> None:
    with pytest.raises(HubError, match="does not exist"):
        mixlab.from_hub(tmp_path / "nothing")
    with pytest.raises(HubError, match=r"no config\.json"):
        mixlab.from_hub(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(HubError, match="is a file"):
        mixlab.push_to_hub(model, tmp_path / "file")
    with pytest.raises(ConfigError, match="OWNER/NAME"):
        mixlab.from_hub("")
    with pytest.raises(MixlabError, match="Linear"):
        mixlab.push_to_hub(nn.Linear(2, 2), tmp_path / "new")
    with pytest.raises(ConfigError, match="Metrics"):
        mixlab.push_to_hub(model, tmp_path / "new", metrics={"top-1": [1]})  # type: ignore[dict-item]
    assert not (tmp_path / "new").exists()
    mixlab.push_to_hub(model, tmp_path)
    with pytest.raises(ConfigError, match="revision"):
        mixlab.from_hub(tmp_path, revision="main")


def test_folders_come_before_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert as_folder("owner/name") is None
    (tmp_path / "owner").mkdir()
    assert as_folder("owner/name") == Path("owner/name")
    assert as_folder("hf-hub:owner/name") is None
    for text in ("name", "./a/b", "/a/b", "a/b/c", "local-dir:a/b"):
        assert as_folder(text) is not None
    assert as_folder(Path("a/b")) == Path("a/b")


# -- the Hub, spoken to by its real client -------------------------------------------------------


def test_a_round_trip_through_a_hub(hub: Hub, model: mixlab.Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    address = mixlab.push_to_hub(model, "me/pets", token=False)
    assert address.startswith(f"{hub.address}/me/pets/commit/")
    assert 'mixlab.from_hub("me/pets")' in hub.files["/me/pets/resolve/main/README.md"].decode()
    assert same(mixlab.from_hub("me/pets", token=False), model)
    asked = len(hub.asked)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert same(mixlab.from_hub("me/pets"), model)  # from the cache
    assert len(hub.asked) == asked


def test_a_card_on_the_hub_stays(hub: Hub, model: mixlab.Backbone) -> None:
    hub.put("me/pets", "README.md", b"mine")
    mixlab.push_to_hub(model, "me/pets", token=False)
    assert hub.files["/me/pets/resolve/main/README.md"] == b"mine"
    assert "/me/pets/resolve/main/config.json" in hub.files


def test_weights_that_were_swapped_on_the_hub_are_refused(hub: Hub, model: mixlab.Backbone) -> None:
    mixlab.push_to_hub(model, "me/pets", token=False)
    path = "/me/pets/resolve/main/model.safetensors"
    hub.files[path] = hub.files[path][:-1] + b"\x01"
    with pytest.raises(HubError, match="sha256"):
        mixlab.from_hub("me/pets", token=False)


def test_without_a_network_the_error_says_what_to_do(
    model: mixlab.Backbone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # its client tries again
    with pytest.raises(HubError, match=r"from_hub\(FOLDER\)"):
        mixlab.from_hub("me/pets", token=False)
    with pytest.raises(HubError, match="Nothing was uploaded"):
        mixlab.push_to_hub(model, "me/pets", token=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
        mixlab.from_hub("me/pets")
    with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
        mixlab.push_to_hub(model, "me/pets")


def test_a_repository_without_our_files_is_told(hub: Hub) -> None:
    with pytest.raises(HubError, match="me/nothing"):
        mixlab.from_hub("me/nothing", token=False)
    hub.put("me/other", "config.json", b'{"architecture": "resnet50"}')
    with pytest.raises(HubError, match="no Mixlab model"):
        mixlab.from_hub("me/other", token=False)


def test_pushing_warns_of_nothing(model: mixlab.Backbone, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mixlab.push_to_hub(model, tmp_path)
        mixlab.from_hub(tmp_path)
