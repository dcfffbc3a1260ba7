import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection
from transformers.loss.loss_deformable_detr import DeformableDetrForObjectDetectionLoss

import mixlab
from mixlab.dense.deformable_detr import DeformableDetector
from mixlab.dense.detector import DeformableOptions, DetectorConfig
from mixlab.dense.matching import LOSS_WEIGHTS, MATCH_COSTS, layer_losses

PICO = mixlab.list_models("*_pico")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "single_scale": {"multi_scale": False},
    "refined": {"box_refine": True},
    "two_stage": {"box_refine": True, "two_stage": True},
}


def detector(
    name: str = "convformer_pico", *, settings: dict[str, Any] | None = None, **options: Any
) -> DeformableDetector:
    """A small one for 3 classes."""
    torch.manual_seed(0)
    config = DetectorConfig(
        **{
            "kind": "deformable_detr",
            "num_classes": 3,
            "width": 64,
            "queries": 20,
            "score_threshold": 0.0,
            **(settings or {}),
        }
    )
    small = {"encoder_layers": 1, "decoder_layers": 2, "feedforward": 32, "heads": 2, "dropout": 0.0}
    backbone = mixlab.create_model(name, num_classes=5)
    return DeformableDetector(backbone, replace(config, deformable=DeformableOptions(**{**small, **options})))


def target(*boxes: list[float], labels: tuple[int, ...] = ()) -> dict[str, Tensor]:
    return {"boxes": torch.tensor(boxes).reshape(-1, 4), "labels": torch.tensor(labels, dtype=torch.long)}


def step(model: DeformableDetector) -> dict[str, Tensor]:
    """A training step on two sizes, one image without objects; every trained parameter must get a gradient."""
    images = [torch.randn(3, 64, 96), torch.randn(3, 80, 64)]
    losses = model.train()(images, [target([8.0, 8, 40, 40], [30, 20, 90, 60], labels=(2, 0)), target()])
    assert isinstance(losses, dict)
    torch.stack(list(losses.values())).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
    return losses


@pytest.mark.parametrize("name", PICO)
def test_every_family_trains_a_step_and_predicts_at_another_size(name: str) -> None:
    model = detector(name)
    assert all(loss.isfinite() for loss in step(model).values())
    with torch.no_grad():
        (found,) = model.eval()([torch.randn(3, 72, 104)])
    assert found["boxes"].shape == (len(found["scores"]), 4)
    assert len(found["labels"]) == len(found["scores"]) == 20 * 3
    left, top, right, bottom = found["boxes"].unbind(1)
    assert ((left >= 0) & (left < right) & (right <= 104)).all()
    assert ((top >= 0) & (top < bottom) & (bottom <= 72)).all()
    assert (found["scores"].diff() <= 0).all()
    assert found["labels"].max() <= 2


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_every_variant_trains_all_its_parameters(variant: str) -> None:
    losses = step(detector(**VARIANTS[variant]))
    assert losses.keys() == {*LOSS_WEIGHTS, "auxiliary_loss", *(["proposal_loss"] if variant == "two_stage" else [])}


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_predictions_are_those_of_transformers_own_detector(variant: str) -> None:
    model = detector(**VARIANTS[variant]).eval()
    for parameter in (*model.classes.parameters(), *model.boxes.parameters()):
        nn.init.normal_(parameter, std=0.1)
    layers = model.options.decoder_layers
    config = DeformableDetrConfig.from_dict(
        model.network.config.to_dict() | {"num_labels": 3, "tie_word_embeddings": False}
    )
    reference = DeformableDetrForObjectDetection(config).eval()
    reference.model = model.network
    reference.class_embed = nn.ModuleList(model.classes[min(at, len(model.classes) - 1)] for at in range(layers))
    for index, head in enumerate(reference.bbox_embed[:layers]):
        own = model.boxes[min(index, len(model.boxes) - 1)]
        for theirs, ours in zip(head.layers, (own[0], own[2], own[4]), strict=True):
            theirs.load_state_dict(ours.state_dict())
    images, mask = torch.randn(2, 3, 64, 96), torch.ones(2, 64, 96, dtype=torch.long)
    mask[1, :, 70:] = 0
    with torch.no_grad():
        expected, (found, _) = reference(images, pixel_mask=mask), model.predict(images, mask)
    torch.testing.assert_close(found[-1][0], expected.logits)
    torch.testing.assert_close(found[-1][1], expected.pred_boxes)


def test_losses_are_those_of_transformers_with_the_authors_weights() -> None:
    scores, boxes = torch.randn(2, 9, 3), torch.rand(2, 9, 4) * 0.4 + 0.3
    targets = [
        {"boxes": torch.rand(4, 4) * 0.4 + 0.3, "class_labels": torch.tensor([0, 2, 1, 1])},
        {"boxes": torch.zeros(0, 4), "class_labels": torch.zeros(0, dtype=torch.long)},
    ]
    config = DeformableDetrConfig.from_dict({"num_labels": 3, **MATCH_COSTS})
    _, named, _ = DeformableDetrForObjectDetectionLoss(scores, targets, scores.device, boxes, config)
    found = layer_losses(scores, boxes, targets, 4)
    for ours, theirs in {"class_loss": "loss_ce", "box_loss": "loss_bbox", "giou_loss": "loss_giou"}.items():
        torch.testing.assert_close(found[ours], LOSS_WEIGHTS[ours] * named[theirs])


@pytest.mark.parametrize("variant", ["plain", "two_stage"])
def test_a_batch_without_any_object_trains_as_negatives(variant: str) -> None:
    model = detector(**VARIANTS[variant]).train()
    losses = model([torch.randn(3, 64, 64)] * 2, [target(), target()])
    assert isinstance(losses, dict)
    assert losses["class_loss"] > 0
    assert losses["box_loss"] == losses["giou_loss"] == 0
    torch.stack(list(losses.values())).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def squares() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Four images with a bright or a dark square each."""
    images, targets = [], []
    for index in range(4):
        image, left, top = torch.randn(3, 64, 64) * 0.2, 4 + 10 * index, 34 - 8 * index
        image[:, top : top + 24, left : left + 24] += 2 - 4 * (index % 2)
        images.append(image)
        targets.append(target([left, top, left + 24.0, top + 24.0], labels=(index % 2,)))
    return images, targets


def test_it_learns_where_bright_and_dark_squares_are() -> None:
    model = detector(settings={"score_threshold": 0.2}).train()
    images, targets = squares()
    optimizer, history = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(32):
        losses = model(images, targets)
        loss = torch.stack(list(losses.values())).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append(loss.item())
    assert history[-1] < 0.3 * history[0]
    with torch.no_grad():
        found = model.eval()(images)
    for one, wanted in zip(found, targets, strict=True):
        assert one["labels"][0] == wanted["labels"][0]
        torch.testing.assert_close(one["boxes"][:1], wanted["boxes"], atol=5, rtol=0)


def test_padding_does_not_change_what_is_found_much() -> None:
    """In a batch with a larger image, boxes still refer to the smaller image's own size."""
    model = detector().eval()
    small = torch.randn(3, 64, 64)
    with torch.no_grad():
        alone, (together, _) = model([small]), model([small, torch.randn(3, 64, 128)])
    torch.testing.assert_close(together["boxes"].mean(0), alone[0]["boxes"].mean(0), atol=8, rtol=0)
    assert together["boxes"].max() <= 64


def test_the_best_pairs_above_the_threshold_are_kept() -> None:
    model = detector(settings={"score_threshold": 0.5, "detections": 2})
    scores = torch.tensor([[0.9, 0.1, 0.8], [0.2, 0.7, 0.4]])
    boxes = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.0, 0.5, 0.5, 1.0]])
    found = model.best(scores, boxes, (40, 80))
    assert found["labels"].tolist() == [0, 2]
    assert found["boxes"].tolist() == [[20, 10, 60, 30]] * 2
    second = detector(settings={"score_threshold": 0.5}).best(scores, boxes, (40, 80))
    assert second["labels"].tolist() == [0, 2, 1]
    assert second["boxes"][2].tolist() == [0, 0, 20, 40]  # cut at the image's edge


def test_the_queries_begin_apart_and_classes_begin_rare() -> None:
    model = detector().eval()
    with torch.no_grad():
        layers, _ = model.predict(torch.randn(1, 3, 64, 64), torch.ones(1, 64, 64, dtype=torch.long))
    scores, boxes = layers[-1]
    assert scores.sigmoid().mean() < 0.05
    assert boxes[0, :, :2].std(0).min() > 0.1
    assert boxes[0, :, 2:].max() < 0.3


@pytest.mark.parametrize("variant", ["plain", "two_stage"])
def test_copies_and_states_hold_every_tensor_once(variant: str) -> None:
    model = detector(**VARIANTS[variant]).eval()
    state = model.state_dict()
    assert len({value.data_ptr() for value in state.values() if value.numel()}) == sum(
        v.numel() > 0 for v in state.values()
    )
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    twin.load_state_dict(state)
    image = [torch.randn(3, 64, 64)]
    with torch.no_grad():
        assert torch.equal(twin(image)[0]["boxes"], model(image)[0]["boxes"])


def test_every_parameter_is_in_one_layer_and_the_rest_comes_last() -> None:
    model = detector("vil_pico")
    names = [name for _, own in model.layer_order for name in own]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    last, own = model.layer_order[-1]
    assert last == "head"
    assert "network.level_embed" in own
    assert model.backbone.config.num_classes == 0


def test_norms_and_unread_maps() -> None:
    model = detector("vil_pico", settings={"norms": True}, multi_scale=False)
    maps: Any = model.network.backbone
    assert len(maps.maps.steps) == len(maps.norms.norms) == 1
    step(model)


def test_on_the_meta_device_it_computes_and_finds_nothing() -> None:
    model = detector().eval().to("meta")
    assert model([torch.empty(3, 64, 96, device="meta")]) == []


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (target([8.0, 8, 8, 20], labels=(0,)), "width and height above 0|no area"),
        (target([8.0, 8, 18, 20], labels=(3,)), "0 to 2"),
        (target([8.0, 8, 18, 20], labels=()), "labels"),
    ],
)
def test_bad_targets_are_named(wanted: dict[str, Tensor], told: str) -> None:
    with pytest.raises(mixlab.MixlabError, match=told.replace("width and height", "width.*height")):
        detector()([torch.randn(3, 64, 64)], [wanted])


def test_bad_settings_are_named() -> None:
    with pytest.raises(mixlab.MixlabError, match="box_refine"):
        DeformableOptions(two_stage=True)
    with pytest.raises(mixlab.MixlabError, match="multiple of 32"):
        detector(settings={"width": 48})
    with pytest.raises(mixlab.MixlabError, match="fewer queries"):
        detector(settings={"queries": 300}, **VARIANTS["two_stage"])([torch.randn(3, 64, 64)])


def test_a_loss_that_is_no_number_is_returned_not_raised() -> None:
    model = detector().train()
    with torch.no_grad():
        nn.init.constant_(model.boxes[0].get_parameter("4.bias"), float("nan"))
    losses = model([torch.randn(3, 64, 64)], [target([8.0, 8, 40, 40], labels=(1,))])
    assert not torch.stack(list(losses.values())).sum().isfinite()
