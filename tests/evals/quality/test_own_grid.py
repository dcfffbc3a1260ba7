import pytest

import mixlab
from mixlab.core.errors import ConfigError
from mixlab.evals.quality.own_grid import is_padded, on_grid, own_step, parse_step, sizes_for, total_stride
from mixlab.evals.subjects import open_subject


@pytest.mark.parametrize(
    ("name", "stride", "step"),
    [
        ("sequencer2d_s", 14, 28),  # the paper's steps
        ("timm:sequencer2d_s", 14, 28),
        ("deit_tiny", 16, 32),
        ("timm:deit_tiny_patch16_224", 16, 32),
        ("timm:convnext_atto", 32, 32),
        ("caformer_s18", 32, 32),
        ("sequencer2d_pico", 8, 8),  # images of 32 px
        ("vil_pico", 4, 4),
    ],
)
def test_the_step_is_a_multiple_of_the_strides(name: str, stride: int, step: int) -> None:
    subject = open_subject(name)
    assert (total_stride(subject), own_step(subject)) == (stride, step)


def test_an_ensemble_takes_a_step_of_all_its_members() -> None:
    members = [mixlab.create_model(name, preprocessing={"crop": 0.9}) for name in ("sequencer2d_s", "vil_tiny")]
    ensemble = mixlab.models.ensemble.Ensemble(members)
    assert own_step(open_subject(ensemble)) == 112
    assert is_padded(open_subject(ensemble), (112, 112)) is False
    assert is_padded(open_subject(ensemble), (224, 210)) is True


def test_sizes_are_rounded_to_the_nearest_step_and_not_below_what_a_model_takes() -> None:
    assert on_grid((160, 256), 28) == (168, 252)
    assert on_grid((42, 32), 28) == (56, 56)
    subject = open_subject("sequencer2d_pico")
    assert sizes_for(subject, [(30, 30), (32, 47), (33, 33)], "own") == [(32, 32), (32, 48)]
    assert sizes_for(subject, [(50, 90)], 32) == [(64, 96)]
    assert sizes_for(subject, [(50, 90)], None) == [(50, 90)]


@pytest.mark.parametrize(
    ("name", "size", "padded"),
    [
        ("sequencer2d_pico", (32, 40), False),
        ("sequencer2d_pico", (32, 36), True),  # only behind the stem
        ("vil_pico", (33, 32), True),
        ("caformer_pico", (33, 35), False),  # its convolutions overlap
        ("coat_lite_pico", (36, 32), True),
        ("timm:deit_tiny_patch16_224", (224, 224), False),
        ("timm:deit_tiny_patch16_224", (230, 224), None),
    ],
)
def test_what_has_to_be_padded_is_known(name: str, size: tuple[int, int], padded: bool | None) -> None:
    assert is_padded(open_subject(name), size) is padded


@pytest.mark.parametrize("step", ["big", "0", -4, "1.5", ""])
def test_a_wrong_step_is_explained(step: str | int) -> None:
    with pytest.raises(ConfigError, match=f"or pixels such as 32 for all models; got {step!r}"):
        parse_step(step)


def test_a_model_that_does_not_state_its_strides_has_no_own_step() -> None:
    subject = open_subject("timm:test_resnet")
    del subject.model.feature_info
    with pytest.raises(ConfigError, match=r"'timm:test_resnet' does not state its strides.*--step 32"):
        own_step(subject)
