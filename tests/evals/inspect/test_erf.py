from collections.abc import Callable
from math import log10
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import mixlab
from mixlab.core.errors import ConfigError, ImageError
from mixlab.evals.inspect.erf import Field, Part, area_of, band, cross_of, find_places, measure_fields
from mixlab.evals.inspect.erf_gallery import Scale, receptive_fields, rescaled
from mixlab.evals.inspect.gradients import differentiable
from mixlab.evals.subjects import Subject, open_subject
from mixlab.findings.findings import Finding

SIDE = 9


def field_of(function: Callable[[Tensor], Tensor], images: Tensor, part: Part = "positive") -> Field:
    return measure_fields(lambda x: {"place": function(x)}, [images], part=part)["place"]


def images(count: int = 2, channels: int = 1, side: int = SIDE) -> Tensor:
    return torch.randn(count, channels, side, side)


# -- what mathematics says -----------------------------------------------------------------------


def test_a_convolution_sees_the_absolute_weights_of_its_kernel_and_nothing_else() -> None:
    kernel = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, -6.0], [7.0, -8.0, 9.0]])
    field = field_of(lambda x: F.conv2d(x, kernel[None, None], padding=1), images(), part="absolute")
    expected = torch.zeros(SIDE, SIDE, dtype=torch.float64)
    expected[3:6, 3:6] = kernel.abs()  # around pixel 4 = floor(9 / 2)
    assert torch.equal(field.contribution, expected)


def test_equation_8_keeps_the_positive_part_and_equation_9_takes_the_logarithm_of_the_sum() -> None:
    kernel = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, -6.0], [7.0, -8.0, 9.0]])
    field = field_of(lambda x: F.conv2d(x, kernel[None, None], padding=1), images(count=3))
    assert torch.equal(field.contribution[3:6, 3:6], kernel.relu().double())
    assert field.score[3, 3] == pytest.approx(log10(3 * 1 + 1))  # 3 images
    assert field.score[3, 4] == 0


def test_channels_of_the_image_and_of_the_map_are_summed() -> None:
    weight = torch.rand(5, 3, 3, 3)
    field = field_of(lambda x: F.conv2d(x, weight, padding=1), images(channels=3))
    torch.testing.assert_close(field.contribution[3:6, 3:6], weight.double().sum((0, 1)))


def test_the_centre_of_an_even_grid_is_the_lower_right_of_the_middle_four() -> None:
    field = field_of(lambda x: x, images(side=8))
    assert field.contribution.nonzero().tolist() == [[4, 4]]


def test_identity_sees_one_point() -> None:
    field = field_of(lambda x: x, images())
    assert field.contribution.nonzero().tolist() == [[4, 4]]
    assert field.area(0.9) == 1 / SIDE**2
    assert field.in_cross == 1
    assert field.cross is None  # there is nothing outside the center


def test_the_global_mean_sees_every_pixel_alike() -> None:
    field = field_of(lambda x: x.mean((2, 3), keepdim=True).expand_as(x), images())
    torch.testing.assert_close(field.contribution, torch.full((SIDE, SIDE), 1 / SIDE**2, dtype=torch.float64))
    assert field.area(0.5) == pytest.approx(0.5, abs=1 / SIDE**2)
    assert field.cross == pytest.approx(0, abs=1e-9)


def test_attention_sees_every_pixel() -> None:
    model = mixlab.create_model("deit_tiny", image_size=64, num_classes=2).eval()
    with differentiable(model):
        found = measure_fields(
            lambda x: model.intermediates(x, ["stages.0.blocks.0"]), [images(1, 3, 64)], part="absolute"
        )
    assert (found["stages.0.blocks.0"].contribution > 0).all()


def test_batches_do_not_change_the_field() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 4, 3, padding=1))
    given = images(count=5)
    whole = measure_fields(lambda x: {"a": net(x)}, [given])["a"]
    parts = measure_fields(lambda x: {"a": net(x)}, [given[:2], given[2:]])["a"]
    torch.testing.assert_close(whole.contribution, parts.contribution)
    assert parts.images == 5


def test_a_map_whose_channels_cancel_is_named_instead_of_drawn() -> None:
    net = nn.Conv2d(1, 8, 3, padding=1)
    field = field_of(lambda x: F.layer_norm(net(x).movedim(1, -1), (8,)).movedim(-1, 1), images())
    assert field.canceled
    assert field.area(0.5) is None
    assert field.cross is None
    assert not field_of(net, images()).canceled


def test_only_the_images_get_gradients_and_the_model_is_left_as_it_was() -> None:
    net = nn.Conv2d(1, 1, 3, padding=1)
    net.bias.requires_grad_(False)  # type: ignore[union-attr]
    with differentiable(net), torch.inference_mode():
        field_of(net, images())
    assert (net.weight.requires_grad, net.bias.requires_grad) == (True, False)  # type: ignore[union-attr]
    assert net.weight.grad is None


# -- numbers on fields made by hand --------------------------------------------------------------


def test_areas_count_the_largest_contributions_first() -> None:
    contribution = torch.tensor([[5.0, 0.0], [2.0, 3.0]])
    assert [area_of(contribution, share) for share in (0.2, 0.5, 0.6, 0.8, 0.9, 1.0)] == [
        *(0.25, 0.25, 0.5, 0.5, 0.75, 0.75)
    ]


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from((0.2, 0.5, 0.9)))
def test_a_uniform_field_holds_a_share_in_the_same_share_of_the_area(height: int, width: int, share: float) -> None:
    area = area_of(torch.full((height, width), 0.1), share)
    assert share - 1e-9 <= area < share + 1 / (height * width) + 1e-9


def test_the_band_is_what_the_centre_cell_covers() -> None:
    assert band(8, 4).nonzero().flatten().tolist() == [4, 5]
    assert band(9, 3).nonzero().flatten().tolist() == [3, 4, 5]
    assert band(96, 14).nonzero().flatten().tolist() == list(range(49, 56))  # patches of 7, the last one padded
    assert band(32, 1).all()


def made(kind: str, side: int = 21) -> Tensor:
    far = torch.arange(side) - side // 2
    down, right = far[:, None].double(), far[None].double()
    radius = (down.square() + right.square()).sqrt()
    return {
        "cross": ((down == 0) | (right == 0)).double(),
        "diagonals": (down.abs() == right.abs()).double(),
        "uniform": torch.ones(side, side, dtype=torch.float64),
        "round": (-radius.round() / 3).exp(),
        "row": (down == 0).expand(side, side).double(),
    }[kind]


@pytest.mark.parametrize(("kind", "expected"), [("cross", 1), ("row", 1), ("uniform", 0), ("round", 0)])
def test_cross_shapedness_is_1_for_a_cross_and_0_for_what_is_the_same_in_every_direction(
    kind: str, expected: float
) -> None:
    middle = torch.arange(21) == 10
    assert cross_of(made(kind), middle, middle) == pytest.approx(expected, abs=1e-9)


def test_cross_shapedness_of_diagonals_is_negative_and_of_a_mixture_in_between() -> None:
    middle = torch.arange(21) == 10
    diagonals, mixture = (
        cross_of(made("diagonals"), middle, middle),
        cross_of(made("cross") + made("round"), middle, middle),
    )
    assert (diagonals or 0) < -0.05
    assert 0.3 < (mixture or 0) < 0.95


def test_the_share_in_row_and_column_of_a_uniform_field_is_their_area() -> None:
    field = Field(contribution=torch.ones(8, 8, dtype=torch.float64), grid=(4, 4), images=1)
    assert field.in_cross == pytest.approx(28 / 64)


# -- models --------------------------------------------------------------------------------------


def random_field(name: str, place: str, size: int = 64) -> Field:
    subject = open_subject(name, image_size=size)
    with differentiable(subject.model):
        return measure_fields(lambda x: subject.intermediates(x, [place]), [images(2, 3, size)])[place]


@pytest.fixture(scope="module")
def early() -> dict[str, Field]:
    torch.manual_seed(0)
    names = ("sequencer2d_pico", "convformer_pico", "hpx_former_pico")
    return {name: random_field(name, "stages.0.blocks.0") for name in names}


def test_a_sequencer_block_sees_exactly_a_cross(early: dict[str, Field]) -> None:
    assert early["sequencer2d_pico"].cross == pytest.approx(1, abs=1e-6)
    assert early["sequencer2d_pico"].in_cross == pytest.approx(1, abs=1e-6)
    for other in ("convformer_pico", "hpx_former_pico"):
        assert (early[other].cross or 0) < 0.5


def test_a_convformer_block_is_local(early: dict[str, Field]) -> None:
    seen = early["convformer_pico"].contribution.nonzero()
    # one 7 x 7 mixer on cells of 2 px behind a 3 x 3 stem: 3 cells each way and 1 px
    assert int((seen.max(0).values - seen.min(0).values + 1).max()) <= 15
    assert (early["convformer_pico"].area(0.9) or 1) < 0.05


def test_hyena_pixel_fills_the_image() -> None:
    field, local = (random_field(name, "stages.3") for name in ("hpx_former_pico", "convformer_pico"))
    assert (field.contribution > 0).double().mean() > 0.95
    assert (field.area(0.9) or 0) > 0.3
    assert (field.area(0.9) or 0) > 2 * (local.area(0.9) or 1)


def test_groups_of_places() -> None:
    sequencer, vil = open_subject("sequencer2d_pico"), open_subject("vil_pico")
    resnet = open_subject("timm:resnet18", num_classes=2)

    def places(subject: Subject, *wanted: str) -> list[str]:
        return find_places(subject.model, subject.intermediate_names, wanted)

    assert places(sequencer, "last") == ["stages.3"]
    assert places(sequencer, "all-stages", "stem") == [*(f"stages.{index}" for index in range(4)), "stem"]
    assert len(places(sequencer, "all-blocks")) == 5
    assert places(vil, "all-stages") == list(vil.model.pyramid_names)  # type: ignore[arg-type]
    assert places(vil, "first-and-last") == ["stages.0.blocks.0", "stages.0.blocks.5"]
    assert places(sequencer, "first") == ["stages.0.blocks.0"]
    assert places(resnet, "all-stages") == [f"layer{index}" for index in range(1, 5)]
    assert places(resnet, "first", "last", "layer1.0.conv1") == ["layer1.0", "layer4.1", "layer1.0.conv1"]
    with pytest.raises(ConfigError, match=r"no intermediate 'stages.9'.*stages\.3"):
        places(sequencer, "stages.9")


# -- the instrument ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> tuple[Finding, dict[str, Any]]:
    models = ["sequencer2d_pico", "timm:resnet18"]
    return receptive_fields(models, data="digits", count=3, image_size=64, at=["first-and-last"], device="cpu")


def test_a_row_for_each_model_and_place(found: tuple[Finding, dict[str, Any]]) -> None:
    told, figures = found
    rows: list[Any] = list(told.table)
    assert [row[:3] for row in rows] == [
        ("sequencer2d_pico", "stages.0.blocks.0", "16x16"),
        ("sequencer2d_pico", "stages.3.blocks.0", "8x8"),
        ("timm:resnet18", "layer1.0", "16x16"),
        ("timm:resnet18", "layer4.1", "2x2"),
    ]
    assert told.settings["images"] == 3
    assert all(0 < row[3] <= row[4] <= row[5] <= 100 for row in rows)
    assert rows[0][7] == pytest.approx(1, abs=1e-6)
    assert list(figures) == ["erf"]


def test_scales_of_pictures() -> None:
    def flat(value: float) -> Field:
        return Field(contribution=torch.full((2, 2), value, dtype=torch.float64), grid=(2, 2), images=1)

    rows = {0: {"a": flat(9), "b": flat(99)}, 1: {"a": flat(999), "b": flat(0)}}
    scales: tuple[Scale, ...] = ("together", "model", "each")
    tops = {scale: {key: float(one.max()) for key, one in rescaled(rows, scale).items()} for scale in scales}
    assert tops["together"] == pytest.approx({(0, "a"): 1 / 3, (0, "b"): 2 / 3, (1, "a"): 1})
    assert tops["model"] == pytest.approx({(0, "a"): 1 / 2, (0, "b"): 1, (1, "a"): 1})
    assert tops["each"] == pytest.approx({(0, "a"): 1, (0, "b"): 1, (1, "a"): 1})


def test_image_files_in_place_of_a_dataset(tmp_path: Path) -> None:
    from PIL import Image

    paths = [tmp_path / f"{index}.png" for index in range(2)]
    for path in paths:
        Image.new("RGB", (50, 40), "red").save(path)
    told, _ = receptive_fields(["convformer_pico"], images=paths, image_size=(32, 48), device="cpu")
    assert told.settings["images"] == 2
    with pytest.raises(ConfigError, match="either a dataset"):
        receptive_fields(["convformer_pico"])


def test_a_map_is_needed() -> None:
    with pytest.raises(ImageError, match="needs a map"):
        field_of(lambda x: x.flatten(1), images())
