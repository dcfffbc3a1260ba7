import copy
import pickle

import pytest
import torch

from mixlab.engine import kept
from mixlab.engine.kept import Kept, same, unchanged


def test_a_value_is_made_once_until_a_source_or_the_key_changes() -> None:
    made: list[int] = []
    source, box = torch.ones(3), Kept[int]()

    def make() -> int:
        made.append(len(made))
        return made[-1]

    assert [box.get("a", [source], make) for _ in range(2)] == [0, 0]
    assert box.get("b", [source], make) == 1
    source.data.mul_(2)  # leaves no trace on the tensor
    assert box.get("b", [source], make) == 2
    assert box.get("b", [source.double()], make) == 3
    assert box.get("b", [], make) == 4
    box.drop()
    assert box.get("b", [], make) == 5


@pytest.mark.parametrize("with_kernels", [True, False])
def test_a_value_is_recalled_only_for_the_very_tensors_that_it_was_made_from(
    with_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_kernels:
        monkeypatch.setattr(kept, "kernels", lambda: None)
    small, large, box = torch.randn(4, 4), torch.randn(300_000), Kept[int]()
    assert box.recall("a", [small, large]) is None
    box.get("a", [small, large], lambda: 1)
    assert box.recall("a", [small, large]) == 1
    assert box.recall("b", [small, large]) is None
    assert box.recall("a", [small]) is None
    assert box.recall("a", [small, large.clone()]) is None
    last = large[-1].clone()
    large.data[-1] += 1
    assert box.recall("a", [small, large]) is None
    large.data[-1] = last
    assert box.recall("a", [small, large]) == 1
    small.data = small.data.t()  # the same memory, read otherwise
    assert box.recall("a", [small, large]) is None
    assert box.get("a", [small, large], lambda: 3) == 3
    assert box.recall("a", [small, large]) is None  # not as it lies in memory: the values are compared
    assert box.get("a", [small, large], lambda: 4) == 3


def test_copies_start_with_nothing() -> None:
    box = Kept[int]()
    box.get("a", [], lambda: 1)
    assert copy.deepcopy(box).entry is None
    assert pickle.loads(pickle.dumps(box)).entry is None


@pytest.mark.parametrize("with_library", [True, False])
def test_same_means_the_same_bits(with_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_library:
        monkeypatch.setattr(kept, "compare_memory", lambda: None)
    one = torch.randn(4, 5)
    other = one.clone()
    assert same(one, other)
    assert same(one.T, other.T)
    assert not same(one, other.T.contiguous().view(4, 5))
    other[3, 4] += 1e-3
    assert not same(one, other)
    assert same(torch.empty(0), torch.empty(0))
    assert unchanged([one], [one.clone()])
    assert not unchanged([one], [one.double()])
    assert not unchanged([one], [one[:3]])
    assert not unchanged([one], [one, one])
