"""Values that are made from parameters, and the watch over what plans stand for."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mixlab.core.hooks import derived, without_engine
from mixlab.engine import watch
from mixlab.engine.cache import CACHE, Cache, Entry
from mixlab.engine.watch import Sources, Watch, same, unchanged


def counted() -> Callable[[], int]:
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    return make


def test_a_value_is_made_once_until_a_source_or_the_key_changes() -> None:
    source, owner, make = torch.ones(3), nn.Identity().eval(), counted()
    assert [derived(owner, ("value", "a"), [source], make) for _ in range(2)] == [0, 0]
    assert derived(owner, ("value", "b"), [source], make) == 1
    source.data.mul_(2)  # leaves no trace on the tensor
    assert derived(owner, ("value", "b"), [source], make) == 2
    assert derived(owner, ("value", "b"), [source.double()], make) == 3
    assert derived(owner, ("value", "b"), [], make) == 4
    assert derived(owner, ("other", "b"), [], make) == 5
    assert derived(owner, ("value", "b"), [], make) == 4


def test_training_gradients_listeners_and_silence_make_values_anew() -> None:
    source, owner, make = torch.ones(3), nn.Sequential(nn.Identity()).eval(), counted()
    assert derived(owner, ("value",), [source], make) == 0
    with without_engine():
        assert derived(owner, ("value",), [source], make) == 1
    assert derived(owner, ("value",), [source], make) == 0
    assert derived(owner, ("value",), [torch.ones(3, requires_grad=True)], make) == 2
    owner[0].register_forward_hook(lambda *_: None)
    assert derived(owner, ("value",), [source], make) == 3
    owner.train()
    assert derived(owner, ("value",), [source], make) == 4
    assert not CACHE.entries(owner)


@pytest.mark.parametrize("with_kernels", [True, False])
def test_sources_are_the_very_tensors_with_the_very_values(with_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_kernels:
        monkeypatch.setattr(watch, "kernels", lambda: None)
    small, large = torch.randn(4, 4), torch.randn(300_000)
    sources = Sources([small, large])
    assert sources.are([small, large])
    assert not sources.are([small])
    assert not sources.are([small, large.clone()])
    last = large[-1].clone()
    large.data[-1] += 1
    assert not sources.are([small, large])
    large.data[-1] = last
    assert sources.are([small, large])
    small.data = small.data.t()  # the same memory, read otherwise
    assert not sources.are([small, large])


def test_copies_and_files_of_a_module_start_with_nothing() -> None:
    owner, make = nn.Linear(2, 2).eval(), counted()
    derived(owner, ("value",), [], make)
    for other in (copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))):
        assert not CACHE.entries(other)
    assert CACHE.entries(owner)


def test_entries_die_with_their_module() -> None:
    owner, value = nn.Linear(2, 2).eval(), nn.Identity()
    left = weakref.ref(value)
    CACHE.keep(owner, "value", Entry(value, lambda: True), 1)
    del value
    assert left() is not None
    del owner
    gc.collect()
    assert left() is None


def test_only_the_entries_that_were_used_last_are_kept() -> None:
    cache, owner = Cache(), nn.Identity()
    for number in range(4):
        cache.keep(owner, ("plan", number), Entry(number, lambda: True), 3)
    assert cache.find(owner, ("plan", 0)) is None
    assert cache.find(owner, ("plan", 1)) == 1
    cache.keep(owner, ("plan", 4), Entry(4, lambda: True), 3)
    assert list(cache.entries(owner)) == [("plan", number) for number in (3, 1, 4)]


def test_what_does_not_hold_is_dropped_when_it_is_asked_for() -> None:
    cache, owner, holds = Cache(), nn.Identity(), [True]
    cache.keep(owner, "value", Entry(1, lambda: holds[0]), 1)
    assert cache.find(owner, "value") == 1
    holds[0] = False
    assert cache.find(owner, "value") is None
    assert not cache.entries(owner)


def changes() -> dict[str, Callable[[nn.Linear], object]]:
    def other_parameter(layer: nn.Linear) -> None:
        layer.weight = nn.Parameter(layer.weight.detach().clone())

    def other_memory(layer: nn.Linear) -> None:
        layer.weight.data = layer.weight.data.clone()

    def other_strides(layer: nn.Linear) -> None:
        layer.weight.data = layer.weight.data.t()

    def other_class(layer: nn.Linear) -> None:
        layer.__class__ = type("Other", (nn.Linear,), {})

    def assigned(layer: nn.Linear) -> None:
        layer.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()}, assign=True)

    def attribute(layer: nn.Linear) -> None:
        layer.in_features = 5

    def forward(layer: nn.Linear) -> None:
        layer.forward = lambda x: x  # type: ignore[method-assign, assignment]

    def hook(layer: nn.Linear) -> None:
        layer.register_forward_hook(lambda *_: None)

    def no_bias(layer: nn.Linear) -> None:
        layer.bias = None  # type: ignore[assignment]

    def mode(layer: nn.Linear) -> None:
        layer.train()

    tensors = (other_parameter, other_memory, other_strides, assigned, no_bias)
    return {change.__name__: change for change in (*tensors, other_class, attribute, forward, hook, mode)}


@pytest.mark.parametrize("change", changes())
def test_a_watch_sees_changes(change: str) -> None:
    layer = nn.Linear(4, 4).eval()
    watched = Watch([layer], tensors=layer.parameters())
    assert watched.holds()
    layer.weight.data.mul_(2)  # it is only pointed at
    assert watched.holds()
    changes()[change](layer)
    assert not watched.holds()


def test_a_watch_sees_numbers_that_are_part_of_the_plan() -> None:
    layer = nn.Linear(4, 4).eval()
    watched = Watch([layer], tensors=layer.parameters(), values=[(layer.bias, layer.bias.detach().clone())])
    assert watched.holds()
    layer.bias.data[0] += 1
    assert not watched.holds()


@pytest.mark.parametrize("with_library", [True, False])
def test_same_means_the_same_bits(with_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not with_library:
        monkeypatch.setattr(watch, "compare_memory", lambda: None)
    one: Tensor = torch.randn(4, 5)
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
