import copy
import json
import warnings
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import mixlab
from mixlab.core.errors import ConfigError, DataError, ImageError
from mixlab.dense.detector import DetectorConfig, Kind, build_detector, create_detector
from mixlab.dense.mask_rcnn import RegionDetector
from mixlab.dense.regions import Anchors, RegionPool, paste_masks
from mixlab.ops.boxes import overlaps

PICO = mixlab.list_models("*_pico")
KINDS = ("mask_rcnn", "cascade_mask_rcnn")
STEPS = {"mask_rcnn": 100, "cascade_mask_rcnn": 75}
SMALL: dict[str, Any] = {
    "width": 16,
    "head_width": 32,
    "anchor_scale": 0.25,
    "anchor_samples": 64,
    "region_samples": 32,
    "proposals": 40,
    "detections": 10,
}
# Table, kind, backbone, options and millions of parameters with COCO's 80 classes
REPORTED = [
    ("HyenaPixel 4", "cascade_mask_rcnn", "hpx_former_s18", {"norms": True}, 84),
    ("CoaT 3", "mask_rcnn", "coat_lite_mini", {}, 30.7),
    ("CoaT 3", "mask_rcnn", "coat_mini", {}, 30.2),
    ("CoaT 3", "mask_rcnn", "coat_lite_small", {}, 39.5),
]
CASCADE_LOSSES = {f"{kind}_loss_{stage}" for kind in ("class", "box", "mask") for stage in (1, 2, 3)}
STAGE_LOSSES = {"mask_rcnn": {"class_loss", "box_loss", "mask_loss"}, "cascade_mask_rcnn": CASCADE_LOSSES}


def small(kind: Kind = "mask_rcnn", backbone: str = "convformer_pico", **options: Any) -> RegionDetector:
    detector = create_detector(backbone, kind, num_classes=3, **{**SMALL, **options})
    assert isinstance(detector, RegionDetector)
    return detector


def images() -> list[Tensor]:
    """Noise, the same each time."""
    noise = torch.Generator().manual_seed(0)
    return [torch.randn(3, *size, generator=noise) for size in ((72, 104), (96, 64))]


def targets() -> list[dict[str, Tensor]]:
    """Two objects in the first image, none in the second."""
    boxes = torch.tensor([[20.0, 10, 60, 40], [70, 30, 100, 70]])
    masks = torch.zeros(2, 72, 104, dtype=torch.bool)
    masks[0, 10:40, 20:60] = True
    masks[1, 30:70, 70:100] = True
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    return [{"boxes": boxes, "labels": torch.tensor([2, 0]), "masks": masks}, nothing]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backbone", PICO)
def test_every_backbone_trains_a_step_and_predicts(backbone: str, kind: Kind) -> None:
    detector = small(kind, backbone)
    losses = detector(images(), targets())
    assert isinstance(losses, dict)
    assert set(losses) == {"objectness_loss", "proposal_loss"} | STAGE_LOSSES[kind]
    assert all(loss.isfinite() for loss in losses.values())
    torch.stack(list(losses.values())).sum().backward()
    for name, parameter in detector.named_parameters():
        assert not parameter.requires_grad or (parameter.grad is not None and parameter.grad.isfinite().all()), name
    with torch.inference_mode():
        found = detector.eval()(images())
    for own, image in zip(found, images(), strict=True):
        assert isinstance(own, dict)
        count, (height, width) = len(own["boxes"]), image.shape[1:]
        assert count
        assert own["boxes"].shape == (count, 4)
        assert own["scores"].shape == own["labels"].shape == (count,)
        assert own["masks"].shape == (count, height, width)
        assert own["masks"].dtype is torch.bool
        assert own["boxes"].amin() >= 0
        assert (own["boxes"].amax(0) <= torch.tensor([width, height, width, height])).all()
        assert (own["labels"] >= 0).all()
        assert (own["labels"] < 3).all()


@pytest.mark.parametrize(("table", "kind", "backbone", "options", "millions"), REPORTED)
def test_parameters_are_those_of_the_papers(
    table: str, kind: Kind, backbone: str, options: dict[str, Any], millions: float
) -> None:
    with torch.device("meta"):
        detector = create_detector(backbone, kind, num_classes=80, **options)
    count = sum(parameter.numel() for parameter in detector.parameters()) / 1e6
    assert count == pytest.approx(millions, rel=0.005), table


def bright_objects() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """A wide and a high rectangle, each in the colour of its class, and an image without any."""
    pictures = [torch.zeros(3, 64, 64), torch.zeros(3, 64, 64)]
    boxes, labels = torch.tensor([[4.0, 8, 36, 24], [40, 20, 56, 56]]), torch.tensor([0, 2])
    masks = torch.zeros(2, 64, 64, dtype=torch.bool)
    for mask, box, label in zip(masks, boxes.int().tolist(), labels.tolist(), strict=True):
        mask[box[1] : box[3], box[0] : box[2]] = True
        pictures[0][label][mask] = 2.0
    nothing = {"boxes": boxes[:0], "labels": labels[:0], "masks": masks[:0]}
    return pictures, [{"boxes": boxes, "labels": labels, "masks": masks}, nothing]


@pytest.mark.parametrize("kind", ["mask_rcnn", pytest.param("cascade_mask_rcnn", marks=pytest.mark.heavy)])
def test_it_learns_what_is_where(kind: Kind) -> None:
    detector = small(kind, width=32, head_width=64, detections=30)
    pictures, truths = bright_objects()
    optimizer = torch.optim.AdamW(detector.parameters(), 2e-3)
    for _ in range(STEPS[kind]):
        losses = detector(pictures, truths)
        assert isinstance(losses, dict)
        optimizer.zero_grad()
        torch.stack(list(losses.values())).sum().backward()
        optimizer.step()
    with torch.inference_mode():
        found, empty = detector.eval()(pictures)
    assert isinstance(found, dict)
    assert isinstance(empty, dict)
    assert not (empty["scores"] > 0.5).any()
    for box, label, mask in zip(*truths[0].values(), strict=True):
        own = found["labels"] == label
        overlap = overlaps(found["boxes"][own], box[None])[:, 0]
        best = overlap.argmax()
        drawn = found["masks"][own][best]
        assert overlap[best] > 0.7
        assert (drawn & mask).sum() / (drawn | mask).sum() > 0.6
        if kind == "mask_rcnn":  # the cascade's later stages take longer
            assert found["scores"][own][best] > 0.5


def test_what_it_returns_depends_on_targets_and_not_on_the_mode() -> None:
    detector = small()
    assert isinstance(detector.eval()(images(), targets()), dict)
    assert isinstance(detector.train()(images()), list)


def test_a_config_survives_json_and_rebuilds_the_detector() -> None:
    detector = small("cascade_mask_rcnn", norms=True, class_agnostic=True, masks=False)
    config = DetectorConfig.parse(json.loads(json.dumps(detector.config.plain())))
    assert config == detector.config
    twin = build_detector(mixlab.create_model("convformer_pico", num_classes=0), config)
    twin.load_state_dict(detector.state_dict())
    for one, other in zip(detector.eval()(images()), twin.eval()(images()), strict=True):
        assert isinstance(one, dict)
        torch.testing.assert_close(one["boxes"], other["boxes"])


def test_a_copy_finds_the_same() -> None:
    detector = small().eval()
    for one, other in zip(detector(images()), copy.deepcopy(detector)(images()), strict=True):
        assert isinstance(one, dict)
        assert all(torch.equal(one[name], other[name]) for name in ("boxes", "scores", "labels", "masks"))


def test_boxes_stay_exact_where_the_arithmetic_is_not() -> None:
    """Reduced precision cannot tell distant pixels apart; what is found may not be rounded to it."""
    detector = small("cascade_mask_rcnn")
    with torch.autocast("cpu", torch.float16):
        losses = detector(images(), targets())
        found = detector.eval()(images())
    assert isinstance(losses, dict)
    assert all(loss.isfinite() for loss in losses.values())
    boxes = torch.cat([own["boxes"] for own in found if isinstance(own, dict)])
    assert boxes.dtype is torch.float32
    assert not torch.equal(boxes, boxes.half().float())


def test_without_masks_there_are_no_mask_heads() -> None:
    detector = small(masks=False)
    boxes_only = [{name: own[name] for name in ("boxes", "labels")} for own in targets()]
    losses = detector(images(), boxes_only)
    assert "mask_loss" not in losses
    found = detector.eval()(images())
    assert isinstance(found, list)
    assert "masks" not in found[0]
    assert not any("mask" in name for name, _ in detector.named_parameters())


def test_class_agnostic_refinement_has_one_box_for_all_classes() -> None:
    assert small(class_agnostic=True).stages[0].box_predictor.regressor.out_features == 4
    assert small(class_agnostic=False).stages[0].box_predictor.regressor.out_features == 12


def test_maps_are_learned_where_all_have_one_stride_and_normed_if_asked() -> None:
    for detector, learned in ((small(backbone="vil_pico"), True), (small(), False)):
        assert any(not isinstance(step, torch.nn.Identity) for step in detector.maps.steps) == learned
    assert small().norms is None
    assert small(norms=True).norms is not None


def test_window_attention_can_be_asked_of_the_backbone() -> None:
    mixers = [
        "sepconv",
        "sepconv",
        {"name": "window_attention", "window": 3},
        {"name": "window_attention", "window": 3},
    ]
    detector = small(backbone="caformer_pico", backbone_options={"mixers": mixers})
    assert [choice.name for choice in detector.backbone.config.mixers][2:] == ["window_attention"] * 2
    assert isinstance(detector(images(), targets()), dict)


def test_the_backbone_is_in_the_layer_order_once() -> None:
    detector = small()
    names = [name for _, own in detector.layer_order for name in own]
    assert sorted(names) == sorted(name for name, _ in detector.named_parameters())
    assert detector.layer_order[-1][0] == "head"


def test_padding_changes_nothing_but_the_batch() -> None:
    """A small image beside a large one is found in as if it were padded alone."""
    detector = small().eval()
    pixels = torch.randn(3, 64, 64)
    with torch.inference_mode():
        one = detector([torch.nn.functional.pad(pixels, (0, 32, 0, 32))])
        other = detector([pixels, torch.randn(3, 96, 96)])
        maps = detector.feature_maps(torch.nn.functional.pad(pixels, (0, 32, 0, 32))[None])
    assert isinstance(one, list)
    assert isinstance(other, list)
    assert other[0]["boxes"].amax() <= 64
    assert [tuple(level.shape[2:]) for level in maps.values()] == [(24, 24), (12, 12), (6, 6), (3, 3), (2, 2)]


def test_anchors_stand_on_cells_at_the_stride_also_where_the_map_was_rounded_up() -> None:
    class Two:
        image_sizes = [(96, 96)] * 2

    (anchors, _) = Anchors((32, 512), (4, 64))(Two(), [torch.zeros(2, 1, 2, 3), torch.zeros(2, 1, 2, 2)])
    assert len(anchors) == 3 * (6 + 4)
    centres = (anchors[:, :2] + anchors[:, 2:]) / 2
    assert centres[-1].tolist() == [64, 64]
    sides = anchors[:3, 2:] - anchors[:3, :2]
    torch.testing.assert_close(sides.prod(1), torch.full((3,), 32.0**2))
    torch.testing.assert_close(sides[:, 1] / sides[:, 0], torch.tensor([0.5, 1.0, 2.0]))


def test_regions_are_pooled_from_the_map_that_fits_their_size() -> None:
    maps = {str(level): torch.full((2, 8, 80 >> level, 80 >> level), float(level)) for level in range(5)}
    boxes = torch.tensor([[100.0, 100, 300, 300], [10, 10, 20, 20], [0, 0, 250, 250], [0, 0, 113, 113]])
    for parts in ([boxes, boxes[:0]], [boxes[:1], boxes[1:]]):
        assert RegionPool(7)(maps, parts).amax((1, 2, 3)).round().tolist() == [1, 0, 2, 1]


def test_pasted_masks_fill_their_boxes() -> None:
    whole = paste_masks(torch.ones(2, 28, 28), torch.tensor([[3.0, 5, 13, 20], [-4, 0, 6, 50]]), (40, 30))
    wanted = torch.zeros(2, 40, 30, dtype=torch.bool)
    wanted[0, 5:20, 3:13] = True
    wanted[1, :, :6] = True
    assert torch.equal(whole, wanted)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"boxes": torch.tensor([[20.0, 10, 60, 40], [70, 30, 70, 70]])}, "Target 0: box 1 is"),
        ({"labels": torch.tensor([2, 3])}, "Target 0: label 1 is 3; this detector has classes 0 to 2"),
        ({"masks": torch.zeros(2, 72, 72, dtype=torch.bool)}, r"Target 0: masks \(2, 72, 104\) are expected"),
        ({"boxes": torch.zeros(1, 4)}, "Target 0: boxes"),
    ],
)
def test_wrong_targets_are_named(change: dict[str, Tensor], says: str) -> None:
    first, second = targets()
    with pytest.raises(DataError, match=says):
        small()(images(), [{**first, **change}, second])


def test_missing_masks_and_targets_are_named() -> None:
    detector = small()
    first, second = targets()
    del first["masks"]
    with pytest.raises(DataError, match="Target 0 has no masks"):
        detector(images(), [first, second])
    with pytest.raises(DataError, match="2 images and 1 targets"):
        detector(images(), [second])
    with pytest.raises(ImageError, match="list of one or more images"):
        detector([])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_classes": 0}, "num_classes of 1 or more"),
        ({"kind": "yolo"}, "'mask_rcnn'"),
        ({"nms": 2.0}, "nms in"),
        ({"anchor_sizes": [8]}, "5 anchor_sizes"),
        ({"widht": 8}, "'width'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        create_detector("convformer_pico", **{"num_classes": 3, **options})


def test_kinds_are_what_the_config_admits() -> None:
    assert set(get_args(Kind)) == {*KINDS, "deformable_detr"}


@pytest.mark.parametrize(("kind", "expected"), [("mask_rcnn", 251e9), ("cascade_mask_rcnn", 729e9)])
def test_macs_of_whole_detectors_are_the_papers(kind: Any, expected: float) -> None:
    """MetaFormer, Table 9; its 800 x 1333 px are counted as 800 x 1280."""
    with torch.device("meta"):
        whole = create_detector("convformer_s18", kind, num_classes=80)
    assert mixlab.macs(whole, (800, 1280)) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "backbone", "expected"),
    [
        ("mask_rcnn", "caformer_s18", 254),
        ("cascade_mask_rcnn", "caformer_s18", 733),
        ("cascade_mask_rcnn", "caformer_s36", 811),
        ("cascade_mask_rcnn", "caformer_m36", 920),
    ],
)
def test_caformer_detects_with_windows_that_cost_what_the_paper_says(kind: Any, backbone: str, expected: int) -> None:
    """MetaFormer, Table 9."""
    with torch.device("meta"):
        whole = create_detector(backbone, kind, num_classes=80)
    assert mixlab.macs(whole, (800, 1280)) / 1e9 == pytest.approx(expected, abs=0.75)


def test_a_detector_has_the_mixers_of_its_paper_unless_others_are_asked_for() -> None:
    """MetaFormer, section 3.2: sliding windows, because of the large images."""
    assert mixers_of(small(backbone="caformer_pico")) == ["sepconv", "sepconv", "window_attention", "window_attention"]
    options: dict[str, Any] = {"backbone_options": {"mixers": ["sepconv", "pool", "pool", "attention"]}}
    assert mixers_of(small(backbone="caformer_pico", **options)) == ["sepconv", "pool", "pool", "attention"]
    assert mixers_of(small(backbone="caformer_pico", backbone_options={"drop_path": 0.1}))[3] == "window_attention"
    assert mixers_of(small(backbone="convformer_pico")) == ["sepconv"] * 4
    built = mixlab.create_model("caformer_pico")
    assert mixers_of(small(backbone=built))[3] == "attention"  # type: ignore[arg-type]


def mixers_of(detector: RegionDetector) -> list[str]:
    return [choice.name for choice in detector.backbone.config.mixers]


def test_weights_of_a_classifier_with_global_attention_fill_windows_without_a_warning(tmp_path: Path) -> None:
    classifier = mixlab.create_model("caformer_pico")
    mixlab.save_weights(classifier, tmp_path / "classifier.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        detector = small(backbone="caformer_pico", weights=tmp_path / "classifier.safetensors")
    ours, theirs = detector.backbone.state_dict(), classifier.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if not name.startswith("head."))
    options: dict[str, Any] = {"backbone_options": {"mixers": ["sepconv", "sepconv", "window_attention", "attention"]}}
    with pytest.warns(UserWarning, match="other mixers"):
        small(backbone="caformer_pico", weights=tmp_path / "classifier.safetensors", **options)
