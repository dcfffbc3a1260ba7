import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import mixlab
from mixlab.core.errors import WeightsError
from mixlab.core.grid import Grid
from mixlab.models.layouts import CONVERSIONS, layouts
from mixlab.models.position import resample_table
from tests.golden import fill
from tests.golden.offered import offered

GOLDEN = Path(__file__).parents[1] / "golden"
# float32 itself is that far from float64 on this record: its values make the norms behind the cell divide by little
BOUNDS = {"vil_tiny": 5e-3}
TIMM = ["convformer_s18", "caformer_s18", "poolformerv2_s12", "sequencer2d_s", "coat_lite_tiny", "coat_tiny"]


def state(model: mixlab.Backbone) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_untouched(model: mixlab.Backbone, before: dict[str, Tensor]) -> None:
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


def pico(**overrides: Any) -> mixlab.Backbone:
    return mixlab.create_model("caformer_pico", **{"num_classes": 5, **overrides}).eval()


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.json") if path.stem != "params"))
def test_logits_equal_the_authors(name: str) -> None:
    record = json.loads((GOLDEN / f"{name}.json").read_text())
    model = mixlab.create_model(name).eval()
    mixlab.load_weights(model, {key: torch.from_numpy(value) for key, value in fill.state_dict(record).items()})
    bound = BOUNDS.get(name, 1e-3)
    for size, logits in record["logits"].items():
        height, width = (int(side) for side in size.split("x"))
        with torch.no_grad():
            ours = model(torch.from_numpy(fill.image(height, width)))[0]
        expected = torch.tensor(logits)
        assert (ours - expected).abs().max() < bound * expected.std()


@pytest.mark.parametrize("norm", [True, False])
def test_released_vision_lstm_files_load_with_and_without_their_extra_norm(norm: bool) -> None:
    record = json.loads((GOLDEN / "vil_tiny.json").read_text())
    tensors = {key: torch.from_numpy(value) for key, value in fill.state_dict(record).items()}
    if not norm:
        tensors = {key: value for key, value in tensors.items() if not key.startswith("legacy_norm.")}
        with pytest.raises(WeightsError, match=r"head.norm.*head=\{'norm': False\}"):
            mixlab.load_weights(mixlab.create_model("vil_tiny"), tensors)
    model = mixlab.create_model("vil_tiny", image_size=96, head={"norm": norm}).eval()
    mixlab.load_weights(model, tensors)
    table = model.get_parameter("stages.0.position.table")
    assert table.shape == (1, 6, 6, 192)
    stored = tensors["blocks.3.rowwise_from_bot_right.norm.weight"]
    assert torch.equal(model.get_parameter("stages.0.blocks.7.token.branches.0.norm.weight"), stored + 1)


@pytest.mark.parametrize("name", ["deit_tiny", "deit3_tiny"])
@pytest.mark.parametrize("size", [(224, 224), (97, 131)])
def test_plain_transformers_equal_live_timm(name: str, size: tuple[int, int]) -> None:
    import timm

    kind = {"no_embed_class": True, "init_values": 1e-4} if name == "deit3_tiny" else {}
    peer = timm.create_model("deit_tiny_patch16_224", **kind).eval()
    ours = mixlab.create_model(name).eval()
    mixlab.load_weights(ours, peer.state_dict())
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in peer.parameters())
    image = torch.randn(1, 3, *size)
    with torch.no_grad():
        logits = ours(image)
        if size == (224, 224):
            expected = peer(image)
            assert (logits - expected).abs().max() < 1e-4 * expected.std()
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", TIMM)
def test_logits_equal_live_timm(name: str) -> None:
    import timm

    peer = timm.create_model(name).eval()
    head: dict[str, Any] = {"head": {"eps": 1e-6}} if "mlp" in str(mixlab.models.zoo.rows()[name].get("head")) else {}
    ours, exact = mixlab.create_model(name).eval(), mixlab.create_model(name, **head).eval()
    image = torch.randn(1, 3, 224, 224)
    for parameter in peer.get_classifier().parameters():  # Sequencer's starts at zero
        torch.nn.init.normal_(parameter, std=0.02)
    with torch.no_grad():
        expected = peer(image)
        for model, bound in ((ours, 1e-3), (exact, 1e-4)):  # timm's head norm has eps 1e-6, the authors' 1e-5
            mixlab.load_weights(model, peer.state_dict())
            assert (model(image) - expected).abs().max() < bound * expected.std()


def test_every_layout_rule_is_a_pattern_with_a_name() -> None:
    for rules in layouts().values():
        for pattern, name, conversion in rules:
            assert pattern.groups >= len(set(re.findall(r"\\\d", name))), pattern
            assert conversion in CONVERSIONS


def test_every_layout_rule_matches_a_key_of_the_code_it_is_for() -> None:
    import timm

    keys = {key for path in GOLDEN.glob("*.json") for key in json.loads(path.read_text()).get("keys", ())}
    keys |= {key for name in TIMM for key in timm.create_model(name).state_dict()}
    keys |= timm.create_model("deit3_small_patch16_224").state_dict().keys()
    keys |= {f"stages.{at}.layer_scale{number}.scale" for at in ("0.0", "0.blocks.0") for number in (1, 2)}  # ablations
    keys |= {offered(key) for key in json.loads((GOLDEN / "vil_tiny.json").read_text())["keys"]}
    for layout, rules in layouts().items():
        for pattern, *_ in rules:
            assert any(pattern.fullmatch(key) for key in keys), f"{layout}: {pattern.pattern}"


def test_a_position_table_of_another_shape_is_reported() -> None:
    model = mixlab.create_model("v_sequencer_s_pe", dims=[16] * 4, depths=[1] * 4)
    tensors = model.state_dict() | {"stages.0.position.table": torch.zeros(1, 255, 16)}
    with pytest.raises(WeightsError, match=r"mis-shaped: stages.0.position.table"):
        mixlab.load_weights(model, tensors)


def test_position_tables_follow_the_image_size(tmp_path: Path) -> None:
    small = mixlab.create_model("v_sequencer_s_pe", dims=[16] * 4, depths=[1] * 4, num_classes=2).eval()
    mixlab.save_weights(small, tmp_path / "m.safetensors")
    large = mixlab.create_model(weights=tmp_path / "m.safetensors", image_size=(280, 224)).eval()
    image = torch.randn(1, 3, 280, 224)
    torch.testing.assert_close(large.embed(image), small.embed(image))
    assert large.state_dict()["stages.0.position.table"].shape == (1, 20, 16, 16)


def test_a_saved_model_is_rebuilt_whole(tmp_path: Path) -> None:
    model = mixlab.create_model(
        "caformer_pico", mixers=["pool", "sepconv", {"name": "attention", "head_dim": 16}, "random"], num_classes=3
    ).eval()
    model.class_names = ("cat", "dog", "owl")
    mixlab.save_weights(model, tmp_path / "m.safetensors")
    twin = mixlab.create_model(weights=tmp_path / "m.safetensors").eval()
    image = torch.randn(1, 3, 40, 64)
    assert torch.equal(twin(image), model(image))
    assert twin.config == model.config
    assert twin.class_names == ("cat", "dog", "owl")


def test_preprocessing_travels_with_the_weights(tmp_path: Path) -> None:
    mixlab.save_weights(pico(preprocessing={"crop": 0.875, "interpolation": "bilinear"}), tmp_path / "m.safetensors")
    model = pico()
    mixlab.load_weights(model, tmp_path / "m.safetensors")
    assert (model.config.preprocessing.crop, model.config.preprocessing.interpolation) == (0.875, "bilinear")


@pytest.mark.parametrize("wrap", ["plain", "model", "ddp", "compiled", "lightning"])
def test_training_checkpoints_are_unwrapped(tmp_path: Path, wrap: str) -> None:
    model, twin = pico(), pico()
    tensors: dict[str, object] = dict(model.state_dict())
    if wrap == "ddp":
        tensors = {f"module.{key}": value for key, value in tensors.items()}
    if wrap == "compiled":
        tensors = {f"_orig_mod.{key}": value for key, value in tensors.items()}
    if wrap == "lightning":
        tensors = {"state_dict": {f"model._orig_mod.{key}": value for key, value in tensors.items()}}
    torch.save({"state_dict": tensors, "epoch": 3} if wrap == "model" else tensors, tmp_path / "m.pth")
    mixlab.load_weights(twin, tmp_path / "m.pth")
    assert_untouched(twin, state(model))


def test_a_classifier_of_another_size_is_replaced_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    source = pico(num_classes=9)
    source.class_names = tuple("abcdefghi")
    mixlab.save_weights(source, path)
    model = pico()
    before = state(model)
    with pytest.raises(
        WeightsError, match=r"mis-shaped: head.classifier.bias \(file \[9\], model \[5\]\).*replace_classifier=True"
    ):
        mixlab.load_weights(model, path)
    assert_untouched(model, before)
    mixlab.load_weights(model, path, replace_classifier=True)
    assert torch.equal(model.state_dict()["head.classifier.weight"], before["head.classifier.weight"])
    assert torch.equal(model.state_dict()["stem.conv.weight"], source.state_dict()["stem.conv.weight"])
    assert model.class_names == ()
    assert mixlab.create_model(weights=path, num_classes=2)(torch.randn(1, 3, 32, 32)).shape == (1, 2)
    assert mixlab.create_model("caformer_pico", weights=path, num_classes=0)(torch.randn(1, 3, 32, 32)).shape == (
        1,
        128,
    )


def test_random_matrices_follow_the_image_size(tmp_path: Path) -> None:
    small = mixlab.create_model("randformer_s12", dims=[8] * 4, depths=[1] * 4, num_classes=2).eval()
    mixlab.save_weights(small, tmp_path / "m.safetensors")
    large = mixlab.create_model(weights=tmp_path / "m.safetensors", image_size=(256, 320)).eval()
    image = torch.randn(1, 3, 256, 320)
    torch.testing.assert_close(large(image), small(image))  # resized once, or on the way
    assert large.state_dict()["stages.2.blocks.0.token.branches.0.mixer.matrix"].shape == (320, 320)


def test_a_non_square_source_is_read_from_the_file(tmp_path: Path) -> None:
    wide = mixlab.create_model("randformer_s12", dims=[8] * 4, depths=[1] * 4, image_size=(128, 256)).eval()
    mixlab.save_weights(wide, tmp_path / "m.safetensors")
    tall = mixlab.create_model(weights=tmp_path / "m.safetensors", image_size=(256, 128)).eval()
    image = torch.randn(1, 3, 256, 128)
    torch.testing.assert_close(tall(image), wide(image))


@pytest.mark.parametrize("keep", [0, 7, 200, 0.5, 0.99])
@pytest.mark.parametrize("name", ["m.safetensors", "m.pth"])
def test_a_truncated_file_is_named_and_changes_nothing(tmp_path: Path, name: str, keep: float) -> None:
    model, path = pico(), tmp_path / name
    if name.endswith("pth"):
        torch.save(model.state_dict(), path)
    else:
        mixlab.save_weights(model, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if keep < 1 else int(keep)])
    other = pico()
    before = state(other)
    with pytest.raises(WeightsError, match=str(path)):
        mixlab.load_weights(other, path)
    assert_untouched(other, before)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch executed",)


def test_nothing_in_a_file_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"stem": Evil()}, "evil.pth")
    with pytest.raises(WeightsError, match="does not execute"):
        mixlab.load_weights(pico(), "evil.pth")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [b"not weights at all", b"\x80\x04\x95", b"PK\x03\x04 broken"])
def test_foreign_files_are_refused(tmp_path: Path, content: bytes) -> None:
    for name in ("a.pth", "a.safetensors", "a.png"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(WeightsError, match=name):
            mixlab.load_weights(pico(), tmp_path / name)


def test_weights_of_another_model_list_the_differences(tmp_path: Path) -> None:
    model = pico()
    before = state(model)
    with pytest.raises(WeightsError) as caught:
        mixlab.load_weights(model, mixlab.create_model("convformer_pico", num_classes=5).state_dict())
    message = str(caught.value)
    assert "10 missing: stages.2.blocks.0.token.branches.0.mixer.project.weight" in message
    assert "unexpected: stages.2.blocks.0.token.branches.0.mixer.act.bias" in message
    assert "more" in message
    assert_untouched(model, before)


def test_a_file_without_a_config_needs_a_name(tmp_path: Path) -> None:
    torch.save(pico().state_dict(), tmp_path / "m.pth")
    with pytest.raises(WeightsError, match="holds no Mixlab config"):
        mixlab.create_model(weights=tmp_path / "m.pth")


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "no.pth", "does not exist"), (tmp_path, "is a folder")):
        with pytest.raises(WeightsError, match=message):
            mixlab.load_weights(pico(), path)
    for path, message in ((tmp_path / "no" / "m.safetensors", "does not exist"), (tmp_path, "is a folder")):
        with pytest.raises(WeightsError, match=message):
            mixlab.save_weights(pico(), path)


def test_values_that_are_no_tensors_are_refused() -> None:
    with pytest.raises(WeightsError, match="'a' is a int, not a tensor"):
        mixlab.load_weights(pico(), {"a": 3})  # type: ignore[dict-item]
    with pytest.raises(WeightsError, match="names to tensors: 0 is a"):
        mixlab.load_weights(pico(), {0: torch.zeros(1)})  # type: ignore[dict-item]
    with pytest.raises(WeightsError, match="file or a mapping"):
        mixlab.load_weights(pico(), None)  # type: ignore[arg-type]
    with pytest.raises(WeightsError, match="empty"):
        mixlab.load_weights(pico(), {})


@pytest.mark.parametrize("spoil", ["meta", "sparse", "whole"])
def test_tensors_that_are_not_plain_numbers_change_nothing(spoil: str) -> None:
    model, tensors = pico(), pico().state_dict()
    before, key = state(model), "readout.norms.0.weight"
    change = {"meta": lambda t: t.to("meta"), "sparse": lambda t: t.to_sparse(), "whole": lambda t: t.long()}[spoil]
    tensors[key] = change(tensors[key])
    with pytest.raises(WeightsError, match="dense tensor of real numbers"):
        mixlab.load_weights(model, tensors)
    assert_untouched(model, before)


def test_two_tensors_for_one_parameter_are_an_error() -> None:
    import timm

    tensors = timm.create_model("poolformerv2_s12").state_dict()
    tensors["head.classifier.weight"] = torch.zeros(1000, 512)
    with pytest.raises(WeightsError, match=r"two different tensors for head.classifier.weight"):
        mixlab.load_weights(mixlab.create_model("poolformerv2_s12"), tensors)


def test_matrices_of_the_models_own_grid_are_taken_as_they_are() -> None:
    frame: dict[str, Any] = {"dims": [8] * 4, "depths": [1] * 4, "image_size": (64, 256)}
    source, model = (mixlab.create_model("randformer_s12", **frame) for _ in range(2))
    mixlab.load_weights(model, source.state_dict())
    assert_untouched(model, state(source))


def test_a_model_without_memory_gets_it_from_the_weights(tmp_path: Path) -> None:
    source = pico(drop_path=0.2)
    mixlab.save_weights(source, tmp_path / "m.safetensors")
    with torch.device("meta"):
        model = mixlab.create_model(weights=tmp_path / "m.safetensors").eval()
    image = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(model(image), source(image))  # a file's tensors are aligned in another way
    assert all(not buffer.is_meta for buffer in model.buffers())


def test_files_may_have_any_name(tmp_path: Path) -> None:
    model = pico()
    mixlab.save_weights(model, tmp_path / "m.pth")
    assert_untouched(mixlab.create_model(weights=tmp_path / "m.pth"), state(model))


def test_wrapped_models_are_saved_and_loaded(tmp_path: Path) -> None:
    model = pico()
    wrapped = torch.compile(model, backend="eager")
    mixlab.save_weights(wrapped, tmp_path / "m.safetensors")  # type: ignore[arg-type]
    mixlab.load_weights(wrapped, tmp_path / "m.safetensors")  # type: ignore[arg-type]
    with pytest.raises(WeightsError, match="Expected a Mixlab model; got a Linear"):
        mixlab.save_weights(torch.nn.Linear(1, 1), tmp_path / "n.safetensors")


def test_weights_trained_for_another_function_are_announced(tmp_path: Path) -> None:
    mixlab.save_weights(pico(activation="gelu"), tmp_path / "m.safetensors")
    with pytest.warns(UserWarning, match="other activation"):
        mixlab.load_weights(pico(activation="relu"), tmp_path / "m.safetensors")


@pytest.mark.parametrize("names", ["abcde", ("a", "b"), (1, 2, 3, 4, 5), 5])
def test_class_names_that_do_not_fit_are_refused(tmp_path: Path, names: Any) -> None:
    model = pico()
    model.class_names = names
    with pytest.raises(WeightsError, match="class_names must be 5 strings"):
        mixlab.save_weights(model, tmp_path / "m.safetensors")


def test_a_broken_description_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    for about in ("[1]", '{"config": [1]}', '{"class_names": 3}', '{"config": {"name": "x", "dims": [1], "new": 1}}'):
        safetensors.torch.save_file({"a": torch.zeros(1)}, path, {"mixlab": about})
        with pytest.raises(WeightsError, match=r"m\.safetensors"):
            mixlab.create_model(weights=path)


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(WeightsError, match="No space left"):
        mixlab.save_weights(pico(), path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_released_vision_lstm_weights_fit_another_readout_without_their_head() -> None:
    record = json.loads((GOLDEN / "vil_tiny.json").read_text())
    tensors = {key: torch.from_numpy(value) for key, value in fill.state_dict(record).items()}
    model = mixlab.create_model("vil_tiny", pool="mean")
    with pytest.raises(WeightsError, match="only the head differs"):
        mixlab.load_weights(model, tensors)
    own = model.state_dict()["head.norm.weight"].clone()
    mixlab.load_weights(model, tensors, replace_classifier=True)
    assert torch.equal(model.state_dict()["head.norm.weight"], own)


def test_a_relative_bias_starts_from_weights_that_know_nothing_of_it() -> None:
    plain = mixlab.create_model("vil_pico", mixers="attention").eval()
    biased = mixlab.create_model("vil_pico", mixers={"name": "attention", "relative_bias": True}).eval()
    torch.nn.init.normal_(biased.get_parameter("stages.0.blocks.0.token.branches.0.mixer.relative_bias.table"))
    mixlab.load_weights(biased, plain.state_dict())
    image = torch.randn(1, 3, 40, 48)
    torch.testing.assert_close(biased(image), plain(image))


def test_a_foreign_position_table_is_taken_for_a_square_one() -> None:
    model = mixlab.create_model("vil_pico", image_size=(32, 128))
    table = model.get_parameter("stages.0.position.table")
    square = torch.randn(1, table[0, ..., 0].numel(), table.shape[3])
    mixlab.load_weights(model, {**model.state_dict(), "stages.0.position.table": square})
    side = int(square.shape[1] ** 0.5)
    expected = resample_table(square.unflatten(1, (side, side)), Grid(*table.shape[1:3]))
    torch.testing.assert_close(table, expected)


@pytest.mark.parametrize("name", ["hb_former_s18", "hpx_former_s18"])
def test_released_hyena_files_load_at_another_image_size(name: str) -> None:
    record = json.loads((GOLDEN / f"{name}.json").read_text())
    tensors = {key: torch.from_numpy(value) for key, value in fill.state_dict(record).items()}
    bands = (16, 16, 24, 32)
    mixers = [{"name": "hyena_pixel", "bands": band} for band in bands]  # kernels that follow from the image size
    options: dict[str, Any] = {"mixers": mixers} if name.startswith("hpx") else {}
    model = mixlab.create_model(name, image_size=96, **options)
    mixlab.load_weights(model, tensors)
    positions = model.get_parameter("stages.0.blocks.0.token.branches.0.mixer.conv.filter.positions")
    assert positions.shape[0] == (47 if name.startswith("hpx") else 2 * 24 * 24 - 1)
