import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mixlab
from mixlab.core.errors import ConfigError, WeightsError
from mixlab.core.grid import Grid
from mixlab.engine.cache import CACHE
from mixlab.models.implicit_filter import distance_1d, distance_2d, features_1d, features_2d
from mixlab.models.mixers import MIXERS, Mixer
from mixlab.models.mixers.hyena import Hyena, LongConv, PlaneConv, SeparableConv
from mixlab.ops.longconv import long_conv_1d, long_conv_2d
from tests.models.mixers.contract import REFERENCE, MixerContract


class TestHyena(MixerContract):
    name = "hyena"


class TestBidirectional(MixerContract):
    name = "hyena_bidirectional"
    options = {"norm": True}


class TestPixel(MixerContract):
    name = "hyena_pixel"


class TestSmallPixelKernels(MixerContract):
    name = "hyena_pixel"
    options = {"kernel": [3, 7], "norm": False, "features": "1d", "form": "fft"}


class TestGrowingPixelKernels(MixerContract):
    name = "hyena_pixel"
    options = {"larger": "resample"}


class TestThirdOrder(MixerContract):
    name = "hyena_bidirectional"
    options = {"order": 3}


class TestFourthOrderPixel(MixerContract):
    name = "hyena_pixel"
    options = {"order": 4, "kernel": 5}


class TestSeparable(MixerContract):
    name = "hyena_pixel"
    options = {"filter": "separable", "kernel": 5}


def build(name: str, grid: Grid = REFERENCE, dim: int = 6, **options: Any) -> Hyena:
    choice = MIXERS.parse({"name": name, **options})
    mixer = MIXERS.builder(choice)(choice.options, dim, 1, grid).blocks[0].branches[0]
    assert isinstance(mixer, Hyena)
    return mixer


def long_conv(mixer: Mixer) -> LongConv:
    conv = mixer.conv
    assert isinstance(conv, LongConv)
    return conv


# -- what is computed ----------------------------------------------------------------------------


def test_the_plane_is_equation_4() -> None:
    mixer, tokens = build("hyena_pixel").double(), torch.randn(2, 30, 6, dtype=torch.float64)
    wide = mixer.project(tokens).transpose(1, 2).unflatten(2, (6, 5))
    query, key, value = mixer.short(wide).permute(0, 2, 3, 1).chunk(3, 3)
    conv = long_conv(mixer)
    kernel = conv.filter((11, 9))
    expected = long_conv_2d(mixer.inner_norm(query * key), kernel, conv.bias, form="direct") * value
    expected = mixer.out(mixer.outer_norm(expected)).flatten(1, 2)
    torch.testing.assert_close(mixer(tokens, REFERENCE), expected)


@pytest.mark.parametrize("causal", [True, False])
def test_a_sequence_is_equation_4(causal: bool) -> None:
    mixer = build("hyena" if causal else "hyena_bidirectional").double()
    tokens = torch.randn(2, 30, 6, dtype=torch.float64)
    padded = torch.nn.functional.pad(mixer.project(tokens).transpose(1, 2), (2, 0) if causal else (1, 1))
    short = torch.nn.functional.conv1d(padded, mixer.short.weight[:, :, 0], mixer.short.bias, groups=18)
    value, one, other = short.transpose(1, 2).chunk(3, 2)
    conv = long_conv(mixer)
    kernel = conv.filter((30,) if causal else (59,))
    expected = mixer.out(long_conv_1d(one * other, kernel, conv.bias, causal=causal, form="direct") * value)
    torch.testing.assert_close(mixer(tokens, REFERENCE), expected)


def test_a_filter_is_a_sine_network_faded_with_the_distance() -> None:
    filter = long_conv(build("hyena_pixel", bands=4, hidden=5)).filter.double()
    hidden: Tensor = filter.positions
    assert filter.shift is not None
    for linear, frequency in zip(filter.linears, filter.frequencies, strict=True):
        hidden = torch.sin(frequency * linear(hidden))
    window = torch.exp(-filter.distance[..., None] * filter.decay.abs()) + filter.shift
    torch.testing.assert_close(filter((11, 9)), filter.out(hidden) * window)
    with torch.no_grad():
        torch.testing.assert_close(filter((11, 9)), filter.out(hidden) * window)


def test_large_filters_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    filter = long_conv(build("hyena_pixel")).filter
    expected = filter((11, 9))
    monkeypatch.setattr("mixlab.models.implicit_filter.TAPS_AT_ONCE", 7)
    with torch.no_grad():
        torch.testing.assert_close(filter((11, 9)), expected)


def test_positions_and_distances_are_the_papers() -> None:
    flat = features_1d(5, 3, 10)
    assert flat.shape == (5, 6)
    for tap in range(5):
        for band in range(3):
            angle = torch.tensor(2 * torch.pi * band * tap / 10)
            torch.testing.assert_close(flat[tap, [band, 3 + band]], torch.stack([angle.cos(), angle.sin()]))
    plane = features_2d(3, 4, 4)
    assert plane.shape == (3, 4, 8)
    torch.testing.assert_close(plane[2, 3, :4], torch.tensor([3.0, 0.03, 2.0, 0.02]).cos())
    torch.testing.assert_close(plane[2, 3, 4:], torch.tensor([3.0, 0.03, 2.0, 0.02]).sin())
    torch.testing.assert_close(distance_1d(5, causal=False), torch.tensor([1, 0.5, 0, 0.5, 1]))
    torch.testing.assert_close(distance_1d(3, causal=True), torch.tensor([0, 0.5, 1]))
    torch.testing.assert_close(distance_2d(3, 3)[0], torch.tensor([2.0, 1, 2]).sqrt())


def test_fresh_values_are_those_of_the_released_code() -> None:
    plane, line = long_conv(build("hyena_pixel", dim=400)), long_conv(build("hyena_bidirectional", dim=400))
    low, high = torch.log(torch.tensor(0.01)) / 1.5, torch.log(torch.tensor(0.01)) / 0.3
    torch.testing.assert_close(line.filter.decay[[0, -1]], torch.stack([low, high]))
    torch.testing.assert_close(plane.filter.decay[[0, -1]], torch.stack([low, high]) / 11)
    assert 0.8 < plane.bias.std() < 1.2
    assert plane.filter.shift is not None
    assert (plane.filter.shift == 0).all()
    assert line.filter.shift is None
    trained = {name for name, p in plane.filter.named_parameters() if p.requires_grad}
    assert {"positions", "decay", "shift", "frequencies.0"} <= trained
    assert "distance" not in trained
    assert {"decay", "distance"} <= dict(line.filter.named_buffers()).keys()


def test_causal_hyena_sees_nothing_later() -> None:
    mixer, tokens = build("hyena").eval(), torch.randn(1, 30, 6)
    changed = tokens.clone()
    changed[:, 17:] += 1
    difference = (mixer(tokens, REFERENCE) - mixer(changed, REFERENCE)).abs().amax((0, 2))
    assert (difference[:17] < 1e-5).all()
    assert (difference[17:] > 1e-5).all()


@pytest.mark.parametrize("name", ["hyena_bidirectional", "hyena_pixel"])
def test_every_place_sees_every_other(name: str) -> None:
    mixer = build(name, dim=3).double()
    torch.nn.init.normal_(mixer.out.weight)
    long_conv(mixer).filter.double()
    tokens = torch.randn(1, 30, 3, dtype=torch.float64)
    seen = torch.autograd.functional.jacobian(lambda one: mixer(one, REFERENCE).sum((0, 2)), tokens)[:, 0].abs().sum(2)
    assert (seen > 0).all()


# -- any size ------------------------------------------------------------------------------------


def test_kernels_keep_their_size_on_larger_grids_unless_asked_to_grow() -> None:
    for option, expected in (("pad", (111, 111)), ("resample", (191, 191))):
        conv = build("hyena_pixel", Grid(56, 56), kernel=111, larger=option).conv
        assert isinstance(conv, PlaneConv)
        assert conv.taps_for(Grid(96, 96)) == expected
        assert conv.taps_for(Grid(20, 30)) == (111, 111)
    mixers = [{"name": "hyena_pixel", "kernel": kernel, "larger": "resample"} for kernel in (111, 55, 27, 13)]
    model = mixlab.create_model("hpx_former_s4", mixers=mixers)
    sides = [
        conv.taps_for(grid)[0]
        for conv, grid in zip(
            (module for module in model.modules() if isinstance(module, PlaneConv)), model.grids(384, 384), strict=True
        )
    ]
    assert sides == [191, 95, 47, 23]


@pytest.mark.parametrize("name", ["hyena", "hyena_bidirectional", "hyena_pixel"])
def test_resampled_filters_keep_their_ends_and_their_centre(name: str) -> None:
    filter = long_conv(build(name)).filter
    own = filter.taps
    for factor in (3, 0.4):
        taps = tuple(2 * round(size * factor / 2) + 1 for size in own)
        kernel, small = filter(taps), filter(own)
        centre = (0,) if name == "hyena" else tuple(size // 2 for size in taps)
        before = (0,) if name == "hyena" else tuple(size // 2 for size in own)
        torch.testing.assert_close(kernel[centre], small[before])
        ends = tuple(-1 for _ in taps)
        torch.testing.assert_close(kernel[ends], small[ends])
    single = tuple(1 for _ in own)
    torch.testing.assert_close(filter(single)[tuple(0 for _ in own)], small[before])


@pytest.mark.parametrize("name", ["hyena_bidirectional", "hyena_pixel"])
def test_weights_of_another_image_size_are_resampled(name: str) -> None:
    source = mixlab.create_model("hpx_former_pico", mixers=name, num_classes=3)
    target = mixlab.create_model("hpx_former_pico", mixers=name, num_classes=3, image_size=(64, 48))
    mixlab.load_weights(target, source.state_dict())
    ours, theirs = (next(m for m in model.modules() if isinstance(m, LongConv)) for model in (target, source))
    torch.testing.assert_close(ours.filter(ours.filter.taps), theirs.filter(ours.filter.taps))


# -- kept filters --------------------------------------------------------------------------------


def output(model: torch.nn.Module, image: Tensor) -> Tensor:
    with torch.no_grad():
        return model(image)


def fresh(model: mixlab.Backbone, image: Tensor) -> Tensor:
    """What a model that keeps nothing gives with these weights."""
    twin = copy.deepcopy(model).eval()
    for module in twin.modules():
        if isinstance(module, LongConv):
            module.reuse = False
    return output(twin, image)


@pytest.mark.parametrize("name", ["hpx_former_pico", "hb_former_pico"])
def test_kept_filters_follow_every_change(name: str, tmp_path: Any) -> None:
    model, image = mixlab.create_model(name, num_classes=7).eval(), torch.randn(2, 3, 32, 40)
    convs = [module for module in model.modules() if isinstance(module, LongConv)]

    def check(what: str) -> None:
        for _ in range(2):
            torch.testing.assert_close(output(model, image), fresh(model, image), msg=what)
        assert all(CACHE.entries(conv) for conv in convs)

    check("first call")
    first = output(model, image)
    with torch.no_grad():
        convs[0].filter.positions.mul_(1.5)
    check("an edit in place")
    convs[1].filter.out.weight.data.mul_(3)
    check("an edit through .data")
    convs[1].bias.data = torch.randn_like(convs[1].bias)
    check("another tensor")
    assert not torch.equal(output(model, image), first)
    other = mixlab.create_model(name, num_classes=7)
    mixlab.save_weights(other, tmp_path / "other.safetensors")
    mixlab.load_weights(model, tmp_path / "other.safetensors")
    check("loaded weights")
    torch.testing.assert_close(output(model, image), output(other.eval(), image))
    image = torch.randn(2, 3, 48, 32)
    check("another size")
    model.double()
    image = image.double()
    check("another dtype")
    model.float()
    image = image.float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()(image).square().mean().backward()
    optimizer.step()
    model.eval()
    check("a training step")
    twin = copy.deepcopy(model)
    torch.testing.assert_close(output(twin, image), output(model, image))
    with torch.no_grad():
        next(m for m in twin.modules() if isinstance(m, LongConv)).bias.add_(1)
    assert not torch.equal(output(twin, image), output(model, image))
    check("a changed copy")


def test_filters_kept_under_inference_mode_meet_gradients_later() -> None:
    model, image = mixlab.create_model("hpx_former_pico").eval().requires_grad_(False), torch.randn(1, 3, 32, 32)
    for module in model.modules():
        if isinstance(module, LongConv):
            module.form = "fft"  # one that serves both
    with torch.inference_mode():
        model(image)
    conv = next(m for m in model.modules() if isinstance(m, LongConv))
    kept = CACHE.entries(conv)
    assert kept
    leaf = image.clone().requires_grad_()
    model(leaf).sum().backward()
    assert leaf.grad is not None
    assert CACHE.entries(conv) == kept


def test_filters_learn_in_eval_mode_too() -> None:
    model, image = mixlab.create_model("hb_former_pico").eval(), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        model(image)
    model(image).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_filters_work_under_function_transforms() -> None:
    mixer = build("hyena_pixel").eval()
    parameters, tokens = dict(mixer.named_parameters()), torch.randn(3, 1, 30, 6)

    def run(values: dict[str, Tensor], one: Tensor) -> Tensor:
        out = torch.func.functional_call(mixer, values, (one, REFERENCE))
        assert isinstance(out, Tensor)
        return out

    stacked = {name: torch.stack([p * factor for factor in (1, 2, 3)]) for name, p in parameters.items()}
    with torch.no_grad():
        together = torch.vmap(run)(stacked, tokens)
        for index in range(3):
            alone = run({name: values[index] for name, values in stacked.items()}, tokens[index])
            torch.testing.assert_close(together[index], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": 4}, "odd sides"),
        ({"kernel": [3, 3, 3]}, "odd sides"),
        ({"bands": 3}, "even bands"),
        ({"short": 2}, "odd short"),
        ({"filter": "separable", "larger": "resample"}, "larger = 'pad'"),
    ],
)
def test_impossible_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MIXERS.parse({"name": "hyena_pixel", **options})


@pytest.mark.parametrize("form", ["direct", "matrix", "fft"])
@pytest.mark.parametrize("name", ["hyena_bidirectional", "hyena_pixel"])
def test_an_empty_batch_gives_an_empty_batch(name: str, form: str) -> None:
    with torch.no_grad():
        assert build(name, form=form)(torch.empty(0, 30, 6), REFERENCE).shape == (0, 30, 6)


def test_distances_never_learn() -> None:
    model = mixlab.create_model("hpx_former_pico", num_classes=3).requires_grad_(True)
    model(torch.randn(1, 3, 32, 32)).sum().backward()
    distances = {name: p for name, p in model.named_parameters() if name.endswith("distance")}
    assert distances
    assert all(p.grad is None for p in distances.values())
    assert distances.keys() <= model.no_decay


def test_kernels_of_another_kind_are_not_resampled() -> None:
    small = mixlab.create_model("hpx_former_pico", mixers={"name": "hyena_pixel", "kernel": 3})
    large = mixlab.create_model("hpx_former_pico", mixers={"name": "hyena_pixel", "kernel": 31})
    with pytest.raises(WeightsError, match="mis-shaped"):
        mixlab.load_weights(small, large.state_dict())
    both_ways = mixlab.create_model("hpx_former_pico", mixers="hyena_bidirectional")
    causal = mixlab.create_model("hpx_former_pico", mixers="hyena")
    with pytest.raises(WeightsError, match="mis-shaped"):
        mixlab.load_weights(causal, both_ways.state_dict())


def test_hooks_on_the_filter_are_heard_after_it_was_kept() -> None:
    mixer, tokens, heard = build("hyena_pixel").eval(), torch.randn(1, 30, 6), []
    with torch.no_grad():
        mixer(tokens, REFERENCE)
        long_conv(mixer).filter.linears[0].register_forward_hook(lambda *_: heard.append(1))
        mixer(tokens, REFERENCE)
    assert heard


def test_forward_derivatives_pass_through_kept_filters() -> None:
    mixer, tokens = build("hyena_pixel").eval(), torch.randn(1, 30, 6)
    with torch.no_grad():
        mixer(tokens, REFERENCE)
        bias = long_conv(mixer).bias

        def run(value: Tensor) -> Tensor:
            out = torch.func.functional_call(mixer, {"conv.bias": value}, (tokens, REFERENCE))
            assert isinstance(out, Tensor)
            return out

        tangent = torch.func.jvp(run, (bias,), (torch.ones_like(bias),))[1]
    assert tangent.abs().sum() > 0


# -- what it shows about itself ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hyena", "hyena_bidirectional", "hyena_pixel"])
def test_the_explained_kernel_is_the_network_times_the_explained_window(name: str) -> None:
    mixer, grid = build(name), Grid(7, 4)
    shown = mixer.explain(torch.empty(0), grid)
    conv = long_conv(mixer)
    positions = conv.filter.resample(conv.filter.positions, conv.taps_for(grid))
    bare = conv.filter.network(positions).movedim(-1, 0)
    torch.testing.assert_close(shown["kernels"], bare * shown["window"])


@pytest.mark.parametrize("name", ["hyena", "hyena_bidirectional", "hyena_pixel"])
@pytest.mark.parametrize("order", [2, 3, 4])
def test_a_higher_order_multiplies_and_convolves_again(name: str, order: int) -> None:
    """Equation 1: y_0 = p_0 p_1 and y_{i+1} = g(y_i) p_{i+2}; in a sequence the released code counts backwards."""
    grid, norms = Grid(3, 4), {"norm": False}
    mixer = build(name, grid, order=order, **norms).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.requires_grad else None
    tokens = torch.randn(2, 12, 6, dtype=torch.float64)
    parts = list(mixer.shorten(mixer.project(tokens), grid).chunk(order + 1, -1))
    assert len(parts) == order + 1
    if name != "hyena_pixel":
        parts = [*reversed(parts[:-2]), *parts[-2:]]
        parts = [*parts[-2:], *parts[:-2]]
    y = parts[0] * parts[1]
    for conv, part in zip([mixer.conv, *mixer.further], parts[2:], strict=True):
        y = conv(y, grid) * part
    with torch.no_grad():
        torch.testing.assert_close(mixer(tokens, grid), mixer.out(y))


@pytest.mark.parametrize("order", [1, 0])
def test_an_order_without_a_convolution_is_an_error(order: int) -> None:
    with pytest.raises(ConfigError, match="order of 2 or more"):
        build("hyena", order=order)


def test_separable_kernels_go_across_then_down_with_biases_and_nothing_beside_them() -> None:
    """The released form of Table 3: v * vertical(horizontal(qk))."""
    mixer, grid = build("hyena_pixel", filter="separable", kernel=(3, 5), norm=False), Grid(4, 5)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter)
    assert {name for name, _ in mixer.conv.named_parameters()} == {
        *("across.weight", "across.bias", "down.weight", "down.bias")
    }
    tokens = torch.randn(2, 20, 6)
    conv = mixer.conv
    assert isinstance(conv, SeparableConv)
    image = tokens.transpose(1, 2).unflatten(2, (4, 5))
    across = F.conv2d(image, conv.across.weight, conv.across.bias, padding=(0, 2), groups=6)
    down = F.conv2d(across, conv.down.weight, conv.down.bias, padding=(1, 0), groups=6)
    torch.testing.assert_close(conv(tokens, grid), down.flatten(2).transpose(1, 2), rtol=1e-4, atol=1e-5)


def test_an_explicit_kernel_has_no_window() -> None:
    mixer = build("hyena_pixel", filter="separable", kernel=(3, 5))
    shown = mixer.explain(torch.empty(0), REFERENCE)
    assert shown["kernels"].shape == (6, 3, 5)
    assert (shown["window"] == 1).all()


@pytest.mark.parametrize("width", [5, 16, 64])
def test_a_norm_of_another_width_is_refused_as_pytorch_refuses_it(width: int) -> None:
    mixer = build("hyena_pixel", dim=32).eval()
    mixer.inner_norm = torch.nn.LayerNorm(width, bias=False)
    with torch.no_grad(), pytest.raises(RuntimeError, match="normalized_shape"):
        mixer(torch.randn(1, REFERENCE.tokens, 32), REFERENCE)
