from typing import Any

import pytest
import torch

import mixlab
from mixlab.core.errors import ConfigError
from mixlab.core.grid import Grid
from mixlab.evals.inspect.kernels import BlockKernels, attention_coverage, learned_kernels, look_at_kernels, offsets
from mixlab.evals.subjects import open_subject


def kernels_of(kernels: torch.Tensor, grid: Grid, window: torch.Tensor | None = None, **options: Any) -> BlockKernels:
    return BlockKernels("b", "m", grid, kernels, window, causal=options.get("causal", False))


def test_coverage_is_the_diameter_where_the_window_is_above_a_twentieth() -> None:
    """exp(-d) >= 0.05 up to d = 2.99: two taps on each side, five in all, of a map that is four wide."""
    distance = torch.hypot(*torch.meshgrid(torch.arange(-4.0, 5), torch.arange(-4.0, 5), indexing="ij"))
    near, flat = (-distance).exp(), torch.ones(9, 9)
    one = kernels_of(torch.ones(2, 9, 9), Grid(4, 8), torch.stack([near, flat]))
    assert one.coverage == pytest.approx(((5 + 9) / 2 / 4 + (5 + 9) / 2 / 8) / 2)


def test_a_window_that_is_small_everywhere_covers_nothing() -> None:
    assert kernels_of(torch.ones(1, 9), Grid(1, 5), torch.full((1, 9), 0.01)).coverage == 0


def test_a_causal_window_counts_from_the_first_tap() -> None:
    window = (-torch.arange(8.0)).exp()[None]  # 0.05 is passed behind tap 2
    assert kernels_of(torch.ones(1, 8), Grid(2, 4), window, causal=True).coverage == pytest.approx(3 / 8)


def test_an_explicit_kernel_covers_its_own_size() -> None:
    assert kernels_of(torch.ones(3, 7, 7), Grid(14, 7)).coverage == pytest.approx((0.5 + 1.0) / 2)


def test_reach_is_the_smallest_centred_part_with_the_mass() -> None:
    kernel = torch.zeros(1, 7, 7)
    kernel[0, 3, 3], kernel[0, 3, 5] = 0.6, -0.4
    one = kernels_of(kernel, Grid(7, 7))
    assert one.reach(0.5) == pytest.approx(1 / 7)
    assert one.reach(0.7) == pytest.approx(5 / 7)
    assert one.reach(1.0) == pytest.approx(5 / 7)


def test_offsets_grow_from_the_centre_to_one() -> None:
    assert (offsets((5,), causal=False) * 5).tolist() == pytest.approx([5, 3, 1, 3, 5])
    assert (offsets((3,), causal=True) * 3).tolist() == pytest.approx([1, 2, 3])
    assert offsets((3, 5), causal=False)[1].tolist() == pytest.approx([1, 0.6, 1 / 3, 0.6, 1])


def test_a_wrapped_kernel_is_what_the_token_in_the_centre_sees() -> None:
    """y[i] = sum over j of k[i - j + center] x[j], written out for a 3 x 4 grid."""
    grid = Grid(3, 4)
    for causal, taps in ((False, 23), (True, 12)):
        kernel = torch.randn(taps)
        seen = kernels_of(kernel[None], grid, causal=causal).picture(kernel).flatten()
        place, center = 1 * 4 + 2, 0 if causal else 11
        expected = [kernel[place - j + center].item() if place - j + center >= 0 else 0.0 for j in range(12)]
        assert seen.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "size", "taps", "grid"),
    [
        ("hpx_former_pico", (64, 32), (31, 31), (32, 16)),  # kernels keep their size
        ("hb_former_pico", (32, 48), (2 * 16 * 24 - 1,), (16, 24)),
        ("convformer_pico", (32, 32), (7, 7), (16, 16)),
    ],
)
def test_kernels_fit_any_size(name: str, size: tuple[int, int], taps: tuple[int, ...], grid: tuple[int, int]) -> None:
    found = learned_kernels(mixlab.create_model(name), size)
    first = found["stages.0.blocks.0"]
    assert (first.taps, tuple(first.grid[:2])) == (taps, grid)
    for one in found.values():
        whole = sum(taps / side for taps, side in zip(one.taps, one.sides, strict=True)) / len(one.taps)
        assert 0 < one.coverage <= whole
        assert 0 < one.reach(0.5) <= one.reach() <= whole


def test_causal_kernels_know_it() -> None:
    found = learned_kernels(mixlab.create_model("caformer_pico", mixers="hyena"))
    assert all(one.causal and one.taps == (one.grid.image_tokens,) for one in found.values())


def test_a_slower_decay_covers_more() -> None:
    model = mixlab.create_model("hpx_former_pico")
    before = learned_kernels(model)["stages.0.blocks.0"].coverage
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("decay"):
                parameter.mul_(0.3)
    assert learned_kernels(model)["stages.0.blocks.0"].coverage > 1.2 * before


def test_the_finding_has_a_row_per_block_and_its_pictures() -> None:
    model = mixlab.create_model("caformer_pico", mixers=["hyena_pixel", "sepconv", "attention", "attention"])
    found, figures = look_at_kernels(open_subject(model), block="stages.0.blocks.0")
    assert [row[:4] for row in found.table] == [
        ("stages.0.blocks.0", "hyena_pixel", "16x16", "31x31"),
        ("stages.1.blocks.0", "sepconv", "8x8", "7x7"),
        ("stages.1.blocks.1", "sepconv", "8x8", "7x7"),
    ]
    assert sorted(figures) == sorted(picture.name for picture in found.pictures) == ["channels", "coverage", "kernels"]
    assert set(attention_coverage(model)) == {f"stages.2.blocks.{i}" for i in range(4)} | {"stages.3.blocks.0"}


def test_what_has_no_kernels_says_so() -> None:
    with pytest.raises(ConfigError, match="no kernels to show: its mixers are attention"):
        learned_kernels(mixlab.create_model("caformer_pico", mixers="attention"))
    with pytest.raises(ConfigError, match=r"no kernels at 'stages\.0\.blocks\.7'. Did you mean"):
        look_at_kernels(open_subject("convformer_pico"), block="stages.0.blocks.7")
    with pytest.raises(ConfigError, match="only Mixlab's own models"):
        learned_kernels(open_subject("timm:resnet18"))
