import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mixlab
from mixlab.core.errors import ConfigError
from mixlab.evals.inspect.saliency import black, grad_cam, integrated_gradients, place_of
from mixlab.evals.subjects import open_subject
from mixlab.models.ensemble import Ensemble

FAMILIES = [
    "caformer_pico",
    "convformer_pico",
    "sequencer2d_pico",
    "vil_pico",
    "hpx_former_pico",
    "hb_former_pico",
    "coat_lite_pico",
    "deit_tiny",
]
IMAGES = torch.randn(2, 3, 48, 64, generator=torch.Generator().manual_seed(3))


def with_opinions(name: str, **options: Any) -> mixlab.Backbone:
    """A fresh model whose classifier is not at its start values: some start at zero."""
    model = mixlab.create_model(name, **{"num_classes": 5, "image_size": 32, **options}).eval()
    for parameter in model.head.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_class_activation_maps_at_any_size(name: str) -> None:
    model = with_opinions(name)
    maps = torch.stack([grad_cam(model, IMAGES, target) for target in range(5)])
    assert maps.shape == (5, 2, 48, 64)
    assert ((maps >= 0) & (maps <= 1)).all()
    assert (maps.std((2, 3)) > 0.01).float().mean() > 0.5  # evidence against a class gives an empty map
    assert not torch.allclose(maps[0], maps[1])
    assert not torch.allclose(maps[:, 0], maps[:, 1])


@pytest.mark.parametrize("name", FAMILIES)
def test_integrated_gradients_add_up_to_the_score(name: str) -> None:
    model = with_opinions(name)
    images = IMAGES[:, :, :32, :40]
    found = integrated_gradients(model, images, [1, 3], steps=24)
    assert found.shape == images.shape
    with torch.no_grad():
        change = model(images) - model(black(model, images))
    expected = torch.stack([change[0, 1], change[1, 3]])
    torch.testing.assert_close(found.sum((1, 2, 3)), expected, atol=0.02, rtol=0.02)


def test_grad_cam_is_the_mean_gradient_times_the_map() -> None:
    """Written out for the layer that the model declares."""
    model, seen = with_opinions("caformer_pico"), []
    layer, to_map = model.class_activation
    handle = layer.register_forward_hook(lambda module, inputs, output: seen.append(output))
    score = model(IMAGES)[:, 2].sum()
    handle.remove()
    values, slope = (to_map(part, (48, 64)) for part in (seen[0], torch.autograd.grad(score, seen[0])[0]))
    expected = (slope.mean((2, 3), keepdim=True) * values).sum(1, keepdim=True).relu()
    expected = nn.functional.interpolate(expected, (48, 64), mode="bilinear")[:, 0].detach()
    expected = expected / expected.amax((1, 2), keepdim=True).clamp(min=1e-30)
    torch.testing.assert_close(grad_cam(model, IMAGES, 2), expected, atol=1e-5, rtol=1e-4)


def test_evidence_lies_where_the_image_has_anything() -> None:
    """Tokens see only their own patch and nothing has a bias, so an empty patch says nothing."""
    model = mixlab.create_model(
        "caformer_pico", mixers="identity", num_classes=2, image_size=64, head={"name": "linear"}
    ).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    weight = model.head.get_parameter("classifier.weight")
    with torch.no_grad():
        weight[1] = -weight[0]  # one of both classes likes it
    image = torch.zeros(1, 3, 128, 192)
    image[:, :, :48, 128:] = torch.randn(1, 3, 48, 64)
    maps = torch.cat([grad_cam(model, image, target) for target in (0, 1)]).sum(0)
    assert maps.max() > 0
    # patches of 16 px that overlap by up to 17, and half a patch of interpolation
    assert maps[:88, 104:].sum() > 0.999 * maps.sum()


class OneQuadrant(nn.Module):
    """The score of class 1 is a curved function of the lower left quadrant; class 0 reads everything."""

    def forward(self, images: Tensor) -> Tensor:
        corner = images[:, :, 8:, :8].square().mean((1, 2, 3))
        return torch.stack([images.mean((1, 2, 3)), corner.sqrt()], 1)


def test_integrated_gradients_lie_in_the_only_quadrant_that_matters() -> None:
    images, baseline = torch.rand(2, 3, 16, 16) + 0.1, torch.full((1, 1, 1, 1), 0.05)
    found = integrated_gradients(OneQuadrant(), images, 1, baseline=baseline)
    assert found[:, :, 8:, :8].abs().sum() == found.abs().sum() > 0
    model = OneQuadrant()
    change = model(images)[:, 1] - model(baseline.expand_as(images))[:, 1]
    torch.testing.assert_close(found.sum((1, 2, 3)), change, atol=1e-4, rtol=1e-4)
    mean = integrated_gradients(OneQuadrant(), images, 0, baseline=torch.zeros(1, 1, 1, 1))
    torch.testing.assert_close(mean, images / (3 * 16 * 16))  # a linear score: every pixel its own value


def test_the_model_explains_its_own_answer_unless_asked_for_another() -> None:
    model = with_opinions("caformer_pico")
    answers = model(IMAGES).argmax(1)
    torch.testing.assert_close(grad_cam(model, IMAGES), grad_cam(model, IMAGES, answers))
    torch.testing.assert_close(grad_cam(model, IMAGES, 3), grad_cam(open_subject(model), IMAGES, [3, 3]))


def test_it_works_without_gradients_around_it_and_leaves_no_trace() -> None:
    model = with_opinions("vil_pico").train()
    with torch.inference_mode():
        images = IMAGES.clone()
        found = grad_cam(model, images, 1)
    assert found.max() > 0
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    torch.testing.assert_close(found, grad_cam(model.eval(), IMAGES, 1))


def test_other_threads_do_not_notice() -> None:
    """While a map is made, another thread asks the same model about images of another size."""
    model, results = with_opinions("caformer_pico"), []
    other = torch.randn(1, 3, 32, 32)
    expected = model(other)
    layer, _ = model.class_activation
    elsewhere = threading.Thread(target=lambda: results.append(model(other)))

    def interrupt(module: nn.Module, inputs: Any) -> None:
        if threading.current_thread() is threading.main_thread() and not elsewhere.is_alive() and not results:
            elsewhere.start()
            elsewhere.join()

    handle = layer.register_forward_pre_hook(interrupt)
    grad_cam(model, IMAGES, 1)
    handle.remove()
    torch.testing.assert_close(results[0], expected)


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_models_of_timm_have_maps_whatever_the_shape_of_their_stages(name: str) -> None:
    """NCHW, tokens and NHWC. Behind a ViT's last attention the image tokens are not read any more."""
    subject = open_subject(f"timm:{name}", num_classes=3, image_size=64)
    images = torch.randn(1, 3, *subject.image_size)
    maps = torch.cat([grad_cam(subject, images, target) for target in range(3)])
    assert maps.shape == (3, *subject.image_size)
    assert maps.isfinite().all()
    assert maps.std() > 0.01
    layer = place_of(subject.model, images.requires_grad_(), torch.tensor([0])).layer
    if name.startswith("vit"):
        assert layer is subject.model.blocks[-2]  # type: ignore[index]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grad_cam(with_opinions("caformer_pico"), IMAGES, 5), r"from 0 to 4; got \[5\]"),
        (lambda: grad_cam(with_opinions("caformer_pico"), IMAGES, [1, 2, 3]), "one for each"),
        (lambda: grad_cam(mixlab.create_model("caformer_pico", num_classes=0), IMAGES), "no classifier"),
        (lambda: grad_cam(Ensemble([with_opinions("caformer_pico")]), IMAGES), "ensemble.*--member 0"),
        (lambda: integrated_gradients(OneQuadrant(), IMAGES), "give a baseline"),
        (lambda: integrated_gradients(with_opinions("caformer_pico"), IMAGES, steps=0), "1 step or more"),
    ],
)
def test_what_cannot_be_explained_is_an_error(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
