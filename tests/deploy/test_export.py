"""Exports run elsewhere and agree with PyTorch; whatever is wrong is said before the long work, and leaves no file."""

import importlib.util
import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mixlab
from mixlab.core.errors import CompileError, ConfigError, DataError, ExportError, ImageError, MixlabError
from mixlab.core.grid import Grid
from mixlab.data.loader import Loader
from mixlab.data.open import open_data
from mixlab.deploy.artifact import is_compiled
from mixlab.deploy.export import export, open_export, write_int8
from mixlab.deploy.specimen import open_specimen
from mixlab.deploy.targets import target_of
from mixlab.models.mixers import Mixer
from mixlab.models.zoo import model_config

onnx: Any = pytest.importorskip("onnx")
onnxruntime: Any = pytest.importorskip("onnxruntime")

PICO = mixlab.list_models("*_pico")
FEW = {"dims": [8] * 4, "depths": [1] * 4}
FAMILIES = ["caformer_pico", "sequencer2d_pico", "vil_pico", "hpx_former_pico", "hb_former_pico", "coat_lite_pico"]
QUICK = ("vil_pico", "hpx_former_pico")  # an export takes ten seconds or more; caformer_pico is in other tests here
PER_STAGE = ("dims", "mixers", "mlp_ratio", "branch_scale", "class_tokens")


def last_stages(name: str) -> mixlab.Backbone:
    """The operators of a family in few blocks: its last two stages with a block each, or two blocks of its only one."""
    row = model_config(name).plain()
    cut = {field: row[field][-2:] for field in PER_STAGE}
    return small(name, **cut, depths=[1, 1] if len(row["dims"]) > 1 else [2], downsample=row["downsample"][-1:])


def small(name: str, **overrides: Any) -> mixlab.Backbone:
    """A model whose classifier does not start at zero, as Sequencer's does."""
    model = mixlab.create_model(name, **{"num_classes": 10, **overrides}).eval()
    nn.init.normal_(model.get_parameter("head.classifier.weight"), std=0.1)
    return model


def tiny(**overrides: Any) -> mixlab.Backbone:
    frame: dict[str, Any] = {"dims": [8, 8], "depths": [1, 1], "mixers": ["pool", "attention"], "branch_scale": "none"}
    return small("caformer_pico", **{**frame, "num_classes": 4, **overrides})


def in_runtime(path: Path, images: Tensor) -> Tensor:
    """The scores by onnxruntime alone, as a user of the file would get them."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["scores"], {"images": images.numpy()})[0])


def check_onnx(model: mixlab.Backbone, folder: Path) -> None:
    """Written, run with batches that were not traced, equal, without complex numbers, and alone in its folder."""
    result = export(model, folder / "model.onnx")
    assert result.difference < 1e-4
    images = torch.randn(5, model.config.in_channels, *model.config.image_size)
    with torch.no_grad():
        expected = model(images)
    assert expected.std() > 1e-2, "there must be something to compare"
    assert (in_runtime(result.path, images) - expected).abs().max() < 1e-4
    assert (in_runtime(result.path, images[:1]) - expected[:1]).abs().max() < 1e-4
    graph = onnx.load(str(result.path)).graph
    kinds = {value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input, *graph.output)}
    kinds |= {tensor.data_type for tensor in graph.initializer}
    assert not kinds & {onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128}
    assert "DFT" not in {node.op_type for node in graph.node}
    assert [file.name for file in folder.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.heavy) for name in FAMILIES]
)
def test_one_model_of_each_family_runs_in_onnxruntime(name: str, tmp_path: Path) -> None:
    check_onnx(last_stages(name), tmp_path)


@pytest.mark.heavy
@pytest.mark.parametrize("name", PICO)
def test_every_pico_model_runs_in_onnxruntime(name: str, tmp_path: Path) -> None:
    check_onnx(small(name), tmp_path)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "mixers",
    [
        ["identity", "random", "pool", "sepconv"],
        ["attention", "window_attention", "convattention", "mlstm"],
        ["hyena", "hyena_bidirectional", "hyena_pixel", {"name": "hyena_pixel", "filter": "separable"}],
        ["rnn2d", {"name": "rnn1d", "cell": "gru"}, {"name": "rnn2d", "cell": "rnn", "bidirectional": False}, "rnn1d"],
    ],
)
def test_every_mixer_runs_in_onnxruntime_also_off_the_size_it_was_built_for(mixers: list[Any], tmp_path: Path) -> None:
    model = small("convformer_pico", mixers=mixers, branch_scale="none", **FEW)
    result = export(model, tmp_path / "model.onnx", image_size=(64, 96))
    images = torch.randn(3, 3, 64, 96)
    with torch.no_grad():
        torch.testing.assert_close(in_runtime(result.path, images), model(images), atol=1e-4, rtol=1e-4)


# -- what is in the file -------------------------------------------------------------------------


def test_an_onnx_file_tells_how_to_prepare_images_and_what_the_scores_mean(tmp_path: Path) -> None:
    model = tiny()
    model.class_names = ("ant", "bee", "cat", "dog")
    export(model, tmp_path / "model.onnx")
    written = onnx.load(str(tmp_path / "model.onnx"))
    about = json.loads({entry.key: entry.value for entry in written.metadata_props}["mixlab"])
    assert about["class_names"] == ["ant", "bee", "cat", "dog"]
    assert about["mean"] == list(model.config.preprocessing.mean)
    assert (about["interpolation"], about["image_size"], about["model"]) == ("bicubic", [32, 32], "caformer_pico")
    assert about["mixlab"] == mixlab.__version__
    assert {one.version for one in written.opset_import if one.domain == ""} == {20}
    (entry,) = written.graph.input
    sides = [side.dim_param or side.dim_value for side in entry.type.tensor_type.shape.dim]
    assert (entry.name, sides) == ("images", ["batch", 3, 32, 32])


def test_a_fixed_batch_is_the_only_one_taken(tmp_path: Path) -> None:
    result = export(tiny(), tmp_path / "model.onnx", batch=3, image_size=(32, 48))
    assert (result.batch, result.image_size) == (3, (32, 48))
    assert in_runtime(result.path, torch.randn(3, 3, 32, 48)).shape == (3, 4)
    with pytest.raises(Exception, match=r"(?i)invalid dimensions"):
        in_runtime(result.path, torch.randn(2, 3, 32, 48))


def test_torch_export_comes_back_with_the_same_scores_for_any_batch(tmp_path: Path) -> None:
    model = tiny(mixers=["hyena_bidirectional", "rnn2d"], image_size=64)
    model.class_names = ("ant", "bee", "cat", "dog")
    result = export(model, tmp_path / "model.pt2", "torch_export")
    back = open_export(result.path)
    images = torch.randn(5, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(back.run(images), model(images))
        torch.testing.assert_close(back.run(images[:1]), model(images[:1]))
    assert back.about["class_names"] == list(model.class_names)
    assert result.bytes == (tmp_path / "model.pt2").stat().st_size


@pytest.mark.heavy
@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_code_gives_the_same_scores_for_any_batch(name: str, tmp_path: Path) -> None:
    model = last_stages(name)
    result = export(model, tmp_path / "model.pt2", "aot")
    back = open_export(result.path)
    images = torch.randn(5, 3, *model.config.image_size)
    with torch.no_grad():
        torch.testing.assert_close(back.run(images), model(images), atol=1e-4, rtol=1e-4)
    assert back.about["model"] == name


def test_a_segmenter_gives_a_score_for_every_class_and_pixel(tmp_path: Path) -> None:
    model = mixlab.create_segmenter(tiny(), "linear", num_classes=5, auxiliary_weight=0, image_size=32).eval()
    weights = tmp_path / "segmenter.safetensors"
    mixlab.save_weights(model, weights)
    result = export(weights, tmp_path / "model.onnx", image_size=(40, 64))
    images = torch.randn(3, 3, 40, 64)
    with torch.no_grad():
        torch.testing.assert_close(in_runtime(result.path, images), model(images), atol=1e-4, rtol=1e-4)
    assert open_export(result.path).about["task"] == "segmentation"


# -- int8 ----------------------------------------------------------------------------------------


@torch.no_grad()
def fit_classifier(model: mixlab.Backbone) -> None:
    """The last layer by least squares on the digits: a few seconds for an accuracy worth comparing."""
    from mixlab.data.transforms import eval_transform

    transform = eval_transform((32, 32), model.config.preprocessing, 3)
    loader = Loader(open_data("digits", "train"), transform, batch_size=128, train=False, seed=0)
    found = [(model.embed(batch.images), batch.labels) for batch in loader.epoch(0)]
    features, labels = torch.cat([one for one, _ in found]), torch.cat([one for _, one in found])
    wide = torch.cat([features, torch.ones(len(features), 1)], 1).double()
    gram = wide.T @ wide + 10 * torch.eye(wide.shape[1])  # without it the classifier hangs on the last digits
    solved = torch.linalg.solve(gram, wide.T @ torch.eye(10).double()[labels]).float()  # (features + 1, 10)
    model.get_parameter("head.classifier.weight").copy_(solved[:-1].T)
    model.get_parameter("head.classifier.bias").copy_(solved[-1])


def test_int8_is_smaller_and_its_accuracy_is_reported_beside_pytorchs(tmp_path: Path) -> None:
    model = tiny(dims=[32, 128], num_classes=10, head="linear")
    fit_classifier(model)
    result = export(model, tmp_path / "int8.onnx", quantize="int8", data="digits")
    assert result.bytes < 0.6 * 4 * sum(parameter.numel() for parameter in model.parameters())
    assert result.top1 is not None
    assert result.exported_top1 is not None
    assert result.top1 > 60
    assert abs(result.exported_top1 - result.top1) < 5
    assert result.quantized_difference is not None
    assert result.difference < result.quantized_difference < 0.2 * result.scale
    back = open_export(result.path)
    assert back.about["quantized"] == "int8"
    assert back.run(torch.randn(4, 3, 32, 32)).shape == (4, 10)
    assert [file.name for file in tmp_path.iterdir()] == ["int8.onnx"]


# -- refusals ------------------------------------------------------------------------------------


class Liar(Mixer):
    """Another value when it is traced."""

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return tokens * (2.0 if torch.compiler.is_compiling() else 1.0)


class Undecided(Mixer):
    """Looks at a value and goes one way or the other, which no graph can."""

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return tokens if tokens.sum() > 0 else -tokens


class Refusing(Mixer):
    exports = False

    def forward(self, tokens: Tensor, grid: Grid) -> Tensor:
        return tokens


def with_mixer(mixer: Mixer) -> mixlab.Backbone:
    model = tiny()
    model.stages[0].blocks[0].token.branches[0].mixer = mixer
    return model


@pytest.mark.parametrize(("mixer", "message"), [(Liar(), "something else"), (Undecided(), "cannot be written down")])
def test_what_computes_something_else_is_not_written(mixer: Mixer, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        export(with_mixer(mixer), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def refuses(tmp_path: Path, error: type[Exception], message: str, model: Any, path: Any, **options: Any) -> None:
    """It raises before anything is traced, and the folder stays as it was."""
    before, steps = sorted(tmp_path.iterdir()), list[str]()
    with pytest.raises(error, match=message):
        export(model, path, say=steps.append, **options)
    assert not steps
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("model", "name", "options", "error", "message"),
    [
        ("caformer_pico", "m.onnx", {"format": "onx"}, ConfigError, "Did you mean 'onnx'"),
        ("caformer_pico", "m.pt2", {}, ConfigError, "must end in .onnx"),
        ("caformer_pico", "m.onnx", {"format": "aot"}, ConfigError, "must end in .pt2"),
        ("caformer_pico", "nowhere/m.onnx", {}, ConfigError, "Cannot write into .*nowhere: No such file"),
        ("caformer_pico", "there.onnx", {}, ConfigError, "exists.*--force"),
        ("caformer_pico", "there.onnx/m.onnx", {}, ConfigError, "Cannot write into .*there.onnx: Not a directory"),
        ("caformer_pico", "folder.onnx", {"force": True}, ConfigError, "it is a folder"),
        ("caformer_pico", "m.onnx", {"quantize": "int4"}, ConfigError, "Unknown quantization 'int4'"),
        ("caformer_pico", "m.pt2", {"quantize": "int8", "format": "torch_export"}, ConfigError, "for the format onnx"),
        ("caformer_pico", "m.onnx", {"batch": 0}, ConfigError, "1 or more; got 0"),
        ("caformer_pico", "m.onnx", {"batch": "any"}, ConfigError, "'dynamic' or a number"),
        ("caformer_pic", "m.onnx", {}, ConfigError, "Did you mean 'caformer_pico'"),
        ("caformer_pico", "m.onnx", {"data": "digits"}, DataError, "1000 classes apart; digits has 10"),
        ("caformer_pico", "m.onnx", {"data": "nowhere"}, MixlabError, "nowhere"),
        ("caformer_pico", "m.onnx", {"image_size": 16}, (ConfigError, ImageError), "32 px or more"),
    ],
)  # fmt: skip
def test_a_wrong_wish_is_refused_before_the_work(
    model: str, name: str, options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    (tmp_path / "there.onnx").write_text("mine")
    (tmp_path / "folder.onnx").mkdir()
    refuses(tmp_path, error, message, model, tmp_path / name, **options)
    assert (tmp_path / "there.onnx").read_text() == "mine"


def test_force_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_text("mine")
    export(tiny(), path, "torch_export", force=True)
    assert open_export(path).run(torch.randn(1, 3, 32, 32)).shape == (1, 4)


def test_a_mixer_that_no_graph_can_hold_is_refused_before_the_work(tmp_path: Path) -> None:
    refuses(tmp_path, ExportError, "Refusing of 'caformer_pico' cannot", with_mixer(Refusing()), tmp_path / "m.onnx")


def test_half_precision_is_refused_before_the_work(tmp_path: Path) -> None:
    refuses(tmp_path, ExportError, "float32; .* has torch.float16", tiny().half(), tmp_path / "m.onnx")


def test_images_below_32_px_are_refused_before_the_work(tmp_path: Path) -> None:
    refuses(tmp_path, ConfigError, "32 px or more; got", tiny(), tmp_path / "m.onnx", image_size=(32, 16))


def test_a_detector_is_refused_and_told_what_can_be_exported(tmp_path: Path) -> None:
    detector = mixlab.create_detector(tiny(image_size=64), num_classes=2)
    weights = tmp_path / "detector.safetensors"
    mixlab.save_weights(detector, weights)
    for model in (detector, weights):
        refuses(tmp_path, ExportError, "Classifiers and segmenters can", model, tmp_path / "m.onnx")


def test_a_missing_library_is_named_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "onnx" else found(name, *rest))
    refuses(tmp_path, MixlabError, r"needs onnx, .*mixlab\[export\]", "caformer_pico", tmp_path / "m.onnx")


def test_a_missing_compiler_is_said_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    refuses(tmp_path, CompileError, r"needs a C\+\+ compiler", "caformer_pico", tmp_path / "m.pt2", format="aot")


@pytest.mark.parametrize("name", ["broken.onnx", "broken.pt2", "other.zip", "absent.onnx"])
def test_a_file_that_is_no_export_is_not_opened(name: str, tmp_path: Path) -> None:
    if not name.startswith("absent"):
        (tmp_path / name).write_text("no model")
    with pytest.raises(MixlabError, match=name.replace(".", r"\.")):
        open_export(tmp_path / name)


def test_machine_code_is_told_from_a_graph_by_its_folder_not_by_the_name_of_the_file(tmp_path: Path) -> None:
    for name, entry, code in (
        ("graph", "aotinductor/models/model.json", False),
        ("m", "m/data/aotinductor/a.so", True),
    ):
        with zipfile.ZipFile(tmp_path / f"{name}.pt2", "w") as archive:
            archive.writestr(entry, "")
        assert is_compiled(tmp_path / f"{name}.pt2") == code


def test_int8_that_gives_no_numbers_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of the float32 file stays behind, nor what a very large one has beside it."""

    def broken(source: Path, target: Path, about: Any) -> int:
        target.write_bytes(source.read_bytes())
        (target.parent / "after").touch()
        return 1

    monkeypatch.setattr("mixlab.deploy.export.quantize_onnx", broken)
    work, specimen = tmp_path / "model.onnx", open_specimen(tiny(), None)
    work.touch()
    (tmp_path / "model.onnx.data").touch()
    nothing = replace(target_of("onnx"), run=lambda path: lambda images: torch.full((len(images), 4), torch.nan))
    with pytest.raises(ExportError, match="no numbers any more"):
        write_int8(specimen, nothing, work, None)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["after", "model.onnx"]
