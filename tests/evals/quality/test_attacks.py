"""Attacks where mathematics knows the answer, and on models with state."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab import create_model
from mixlab.core.errors import ConfigError, MixlabError
from mixlab.evals.quality.attacks import LEVELS, Attack, PixelModel, loss
from mixlab.evals.quality.examine import check_still
from mixlab.evals.quality.scores import Score
from mixlab.evals.subjects import Subject, of_backbone
from mixlab.models.config import Preprocessing

SIDE = 6


class Linear(nn.Module):
    """Two scores of normalized images: the weights of class 0 and nothing for class 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.Parameter(torch.randn(3, SIDE, SIDE))

    def forward(self, images: Tensor) -> Tensor:
        scores = (images * self.weights).sum((1, 2, 3))
        return torch.stack([scores, torch.zeros_like(scores)], 1)


STD = (0.5, 0.25, 0.2)


@pytest.fixture
def linear() -> PixelModel:
    preprocessing = Preprocessing(mean=(0.4, 0.5, 0.6), std=STD)
    subject = Subject(
        name="linear",
        model=Linear(),
        image_size=(SIDE, SIDE),
        in_channels=3,
        num_classes=2,
        preprocessing=preprocessing,
        trained=True,
    )
    return PixelModel(subject).eval()


def weights_of(linear: PixelModel) -> nn.Parameter:
    assert isinstance(linear.model, Linear)
    return linear.model.weights


def inner_pixels(count: int = 4) -> Tensor:
    """Far enough from black and white that nothing is cut off."""
    return 0.25 + 0.5 * torch.rand(count, 3, SIDE, SIDE)


@pytest.mark.parametrize("kind", ["fgsm", "pgd"])
@pytest.mark.parametrize("epsilon", [1.0, 2.5])
def test_the_optimum_of_a_linear_model_is_reached_exactly(linear: PixelModel, kind: str, epsilon: float) -> None:
    """The worst change is epsilon * sign(w), and lowers the margin by epsilon times the sum of |w| / std."""
    pixels, labels = inner_pixels(), torch.tensor([0, 1, 0, 1])
    attack = Attack(kind=kind, epsilon=epsilon, steps=5, step_size=0.6)  # type: ignore[arg-type]
    found = attack(linear, pixels, labels)
    weights = weights_of(linear).detach()
    away = torch.where(labels == 0, -1.0, 1.0)[:, None, None, None]
    assert torch.allclose(found - pixels, away * epsilon / LEVELS * weights.sign(), atol=1e-7)

    margins = torch.where(labels == 0, 1.0, -1.0) * linear(pixels)[:, 0]
    fall = epsilon / LEVELS * (weights.abs() / torch.tensor(STD)[:, None, None]).sum()
    before, after = (F.cross_entropy(linear(one), labels, reduction="none") for one in (pixels, found))
    assert torch.allclose(before, F.softplus(-margins), atol=1e-5)
    assert torch.allclose(after, F.softplus(fall - margins), atol=1e-4)


def test_small_steps_of_pgd_add_up_and_stop_at_epsilon(linear: PixelModel) -> None:
    pixels, labels = inner_pixels(), torch.tensor([0, 1, 0, 1])
    few = Attack(kind="pgd", epsilon=4, steps=3, step_size=0.5)(linear, pixels, labels)
    many = Attack(kind="pgd", epsilon=4, steps=20, step_size=0.5)(linear, pixels, labels)
    assert (few - pixels).abs().max() == pytest.approx(1.5 / LEVELS, rel=1e-4)
    assert (many - pixels).abs().max() == pytest.approx(4 / LEVELS, rel=1e-4)


def test_pixels_stay_between_black_and_white(linear: PixelModel) -> None:
    pixels = torch.randint(0, 2, (4, 3, SIDE, SIDE)).float()
    for attack in (Attack(kind="fgsm", epsilon=16), Attack(kind="pgd", epsilon=16, step_size=8)):
        found = attack(linear, pixels, torch.tensor([0, 1, 0, 1]))
        assert 0 <= found.min() <= found.max() <= 1
        assert (found - pixels).abs().max() <= 16 / LEVELS + 1e-6


def test_gradients_that_are_tiny_have_a_sign_too(linear: PixelModel) -> None:
    """A sure model has gradients far below a millionth; an attack that took them for zero would flatter it."""
    weights_of(linear).data.fill_(1.0)
    pixels = torch.full((1, 3, SIDE, SIDE), 0.6)  # a margin of 29
    assert linear(pixels)[0, 0].item() == pytest.approx(28.8)
    found = Attack(kind="fgsm", epsilon=1)(linear, pixels, torch.tensor([0]))
    assert torch.allclose(pixels - found, torch.tensor(1 / LEVELS), atol=1e-7)


def test_the_loss_is_the_cross_entropy() -> None:
    scores, labels = torch.randn(5, 7, dtype=torch.float64, requires_grad=True), torch.randint(0, 7, (5,))
    wanted = F.cross_entropy(scores, labels, reduction="none")
    assert torch.allclose(loss(scores, labels), wanted)
    ours, theirs = (torch.autograd.grad(one.sum(), scores)[0] for one in (loss(scores, labels), wanted))
    assert torch.allclose(ours, theirs)


def test_the_defaults_are_the_papers() -> None:
    attack = Attack(kind="pgd")
    assert (attack.epsilon, attack.steps, attack.step) == (1, 5, 0.5)
    with pytest.raises(ConfigError, match="fgsm"):
        Attack(kind="fgm")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="epsilon"):
        Attack(kind="fgsm", epsilon=-1)


def pico(name: str) -> PixelModel:
    model = create_model(name, num_classes=4, image_size=32, drop_path=0.5)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.out_features == 4:
            nn.init.normal_(module.weight)  # fresh heads may start at zero
    return PixelModel(of_backbone(name, model, 32, trained=True)).eval()


@pytest.mark.parametrize("name", ["sequencer2d_pico", "vil_pico", "hpx_former_pico", "caformer_pico"])
@pytest.mark.parametrize("kind", ["fgsm", "pgd"])
def test_models_are_attacked_in_eval_mode_with_nothing_dropped(name: str, kind: str) -> None:
    """The attack repeats itself bit by bit, raises the loss and leaves the parameters as they were."""
    model, attack = pico(name), Attack(kind=kind, epsilon=2)  # type: ignore[arg-type]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    learned = [parameter.requires_grad for parameter in model.parameters()]
    pixels, labels = torch.rand(3, 3, 32, 32), torch.tensor([0, 1, 2])
    with torch.inference_mode():
        model(pixels)  # what eval mode keeps must not stand in the way of gradients
    first, second = (attack(model, pixels, labels) for _ in range(2))
    assert torch.equal(first, second)
    assert not any(module.training for module in model.modules())
    assert [parameter.requires_grad for parameter in model.parameters()] == learned
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        losses = [F.cross_entropy(model(one), labels).item() for one in (pixels, first)]
    assert losses[1] > losses[0]


def test_the_gradient_of_a_recurrent_model_is_that_of_eval_mode() -> None:
    """FGSM goes along the sign of the gradient that a plain backward pass finds with all paths kept."""
    model = pico("sequencer2d_pico")
    pixels, labels = inner_images(2), torch.tensor([1, 3])
    found = Attack(kind="fgsm")(model, pixels, labels)
    own = pixels.clone().requires_grad_()
    F.cross_entropy(model(own), labels, reduction="sum").backward()
    assert own.grad is not None
    assert torch.allclose(found - pixels, own.grad.sign() / LEVELS, atol=1e-7)


def inner_images(count: int) -> Tensor:
    return 0.25 + 0.5 * torch.rand(count, 3, 32, 32)


def test_a_model_in_train_mode_is_refused(linear: PixelModel) -> None:
    with pytest.raises(ConfigError, match="eval mode"):
        Attack(kind="fgsm")(linear.train(), inner_pixels(), torch.tensor([0, 1, 0, 1]))


def test_an_epsilon_of_zero_returns_the_images_themselves(linear: PixelModel) -> None:
    pixels = torch.rand(4, 3, SIDE, SIDE)
    for attack in (Attack(kind="fgsm", epsilon=0), Attack(kind="pgd", epsilon=0)):
        assert torch.equal(attack(linear, pixels, torch.tensor([0, 1, 0, 1])), pixels)


def test_a_run_whose_epsilon_of_zero_differs_from_clean_is_thrown_away() -> None:
    check_still("model", [Score(3, 4)], Score(3, 4))
    with pytest.raises(MixlabError, match="2 of 4 images right under an attack with an epsilon of 0"):
        check_still("model", [Score(3, 4), Score(2, 4)], Score(3, 4))


def test_pixels_are_normalized_as_the_transform_does(linear: PixelModel) -> None:
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.4, 0.5, 0.6), STD))
    pixels = inner_pixels()
    assert torch.allclose(linear(pixels), linear.model((pixels - mean) / std))
    assert math.isfinite(linear(pixels).sum().item())
