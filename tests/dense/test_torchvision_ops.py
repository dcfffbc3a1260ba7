import sys

import pytest
import torch
import torchvision
from torchvision import extension

from mixlab.dense import torchvision_ops
from mixlab.dense.torchvision_ops import supply_operators
from mixlab.ops.boxes import nms_reference, roi_align_reference

supply_operators()  # here already: importing a test module must not need an order


def test_torchvision_s_functions_give_what_the_formulas_say() -> None:
    """Whoever computes them here: the compiled operators or ours."""
    corners = torch.rand(30, 2, 2) * 20
    boxes, scores = torch.cat([corners.amin(1), corners.amax(1)], 1), torch.rand(30)
    assert torch.equal(torchvision.ops.nms(boxes, scores, 0.3), nms_reference(boxes, scores, 0.3))
    groups = torch.arange(30) % 2
    kept = torchvision.ops.batched_nms(boxes, scores, groups, 0.3)
    apart = [nms_reference(boxes[groups == one], scores[groups == one], 0.3) for one in (0, 1)]
    assert len(kept) == sum(len(own) for own in apart)
    maps = torch.randn(2, 6, 10, 12)
    for samples in (-1, 2):
        pooled = torchvision.ops.roi_align(maps, [boxes[:3], boxes[3:5]], (3, 2), 0.5, samples, aligned=True)
        regions = torch.cat([torch.tensor([0.0, 0, 0, 1, 1])[:, None], boxes[:5]], 1)
        wanted = roi_align_reference(maps, regions, (3, 2), scale=0.5, samples=samples, aligned=True)
        torch.testing.assert_close(pooled, wanted)


def test_real_operators_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pooling = sys.modules["torchvision.ops.roi_align"]
    before = vars(pooling).copy()
    monkeypatch.setattr(torchvision_ops, "_supplied", None)
    monkeypatch.setattr(extension, "_has_ops", lambda: True)
    assert not supply_operators()
    assert torchvision_ops._supplied is None
    assert vars(pooling) == before


def test_a_second_call_does_nothing() -> None:
    assert not supply_operators()
