import random

import pytest
import torch
from torch import Tensor

from mixlab.ops import boxes
from mixlab.ops.boxes import nms, nms_reference, pool_by_gathering, pool_by_products, roi_align, roi_align_reference
from tests.ops.agree import assert_agree

CASES = 1000


def random_boxes(count: int, extent: float) -> Tensor:
    corners = torch.rand(count, 2, 2) * extent * 1.5 - extent * 0.25  # some reach outside
    return torch.cat([corners.amin(1), corners.amax(1)], 1)


def random_regions(count: int, images: int, extent: float) -> Tensor:
    return torch.cat([torch.randint(images, (count, 1)).float(), random_boxes(count, extent)], 1)


def test_nms_equals_the_greedy_loop_on_1000_random_cases() -> None:
    generator = random.Random(0)
    for _ in range(CASES):
        count = generator.randrange(24)
        candidates = random_boxes(count, 10).round() if generator.random() < 0.5 else random_boxes(count, 10)
        scores = torch.randint(6, (count,)).float()  # ties too
        threshold = generator.choice([0.0, 0.2, 0.5, 0.7])
        assert torch.equal(nms(candidates, scores, threshold), nms_reference(candidates, scores, threshold))


@pytest.mark.parametrize("spread", [1.0, 20.0, 400.0])
def test_nms_over_several_blocks(spread: float) -> None:
    centres = torch.randn(5 * boxes.BLOCK // 2, 2) * spread
    candidates, scores = torch.cat([centres - 8, centres + 8], 1), torch.rand(len(centres))
    assert torch.equal(nms(candidates, scores, 0.5), nms_reference(candidates, scores, 0.5))


def test_boxes_without_an_area_suppress_nothing() -> None:
    candidates = torch.tensor([[1.0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 2, 2]])
    assert nms(candidates, torch.tensor([3.0, 2, 1]), 0.5).tolist() == [0, 1, 2]


def test_roi_align_equals_the_loop_over_samples_on_1000_random_cases() -> None:
    generator = random.Random(0)
    for case in range(CASES):
        sizes = generator.randint(1, 2), generator.choice([1, 5]), generator.randint(1, 9), generator.randint(1, 9)
        maps = torch.randn(*sizes, dtype=torch.float64, requires_grad=True)
        scale = generator.choice([1.0, 0.5, 0.25])
        regions = random_regions(generator.randrange(3), sizes[0], max(sizes[2:]) / scale).double()
        output = generator.randint(1, 4), generator.randint(1, 4)
        samples, aligned = generator.choice([-1, 0, 1, 2, 3]), generator.random() < 0.5
        fast = roi_align(maps, regions, output, scale=scale, samples=samples, aligned=aligned)
        slow = roi_align_reference(maps, regions, output, scale=scale, samples=samples, aligned=aligned)
        torch.testing.assert_close(
            fast, slow, msg=f"case {case}: {maps.shape}, {regions}, {output}, {samples}, {aligned}"
        )
        if case % 10 == 0 and len(regions):
            assert_agree(fast, slow, [maps])


@pytest.mark.parametrize("form", [pool_by_products, pool_by_gathering])
def test_both_forms_have_the_right_gradient(form: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxes, "FEW_CHANNELS", 9 if form is pool_by_products else 0)
    regions = random_regions(4, 2, 6).double()
    maps = torch.randn(2, 2, 5, 6, dtype=torch.float64, requires_grad=True)
    for samples in (-1, 2):
        assert torch.autograd.gradcheck(lambda x, n=samples: roi_align(x, regions, (3, 2), samples=n), maps)


def test_regions_turned_inside_out_are_pooled_as_the_formulas_say() -> None:
    maps = torch.randn(1, 2, 6, 7)
    regions = torch.tensor([[0.0, 5, 4, 2, 1], [0, 3, 3, 3, 3], [0, 90, 90, 99, 99], [0, -9, -9, 20, 20]])
    for aligned in (False, True):
        for samples in (-1, 2):
            fast = roi_align(maps, regions, (2, 3), samples=samples, aligned=aligned)
            slow = roi_align_reference(maps, regions, (2, 3), samples=samples, aligned=aligned)
            torch.testing.assert_close(fast, slow)


def test_a_plane_is_pooled_to_its_value_at_the_bins_centres() -> None:
    """Bilinear samples of a plane are exact, and so is their mean: no other formula is needed to say what comes out."""
    plane = (torch.arange(32.0)[:, None] * 2 + torch.arange(32.0) * 3).expand(1, 8, 32, 32)
    pooled = roi_align(plane, torch.tensor([[0, 16.0, 24, 72, 108]]), (7, 7), scale=0.25, aligned=True)
    rows, columns = 6 - 0.5 + 3 * (torch.arange(7) + 0.5), 4 - 0.5 + 2 * (torch.arange(7) + 0.5)
    torch.testing.assert_close(pooled[0, 0], rows[:, None] * 2 + columns * 3)


def test_reduced_precision_is_pooled_in_float32_and_handed_back_as_given() -> None:
    maps, regions = torch.randn(1, 8, 9, 9), random_regions(5, 1, 9)
    for dtype in (torch.bfloat16, torch.float16):
        pooled = roi_align(maps.to(dtype), regions, (2, 2))
        assert pooled.dtype is dtype
        torch.testing.assert_close(pooled, roi_align(maps.to(dtype).float(), regions, (2, 2)).to(dtype))


def test_no_regions_give_no_rows_but_keep_the_gradient_connected() -> None:
    maps = torch.randn(2, 5, 4, 4, requires_grad=True)
    pooled = roi_align(maps, torch.zeros(0, 5), (7, 7))
    assert pooled.shape == (0, 5, 7, 7)
    pooled.sum().backward()
    assert maps.grad is not None
    assert not maps.grad.any()
