import copy
from pathlib import Path

import pytest
import torch

import mixlab
from mixlab.core.errors import ConfigError, WeightsError
from mixlab.deploy import compile_blocks

IMAGE = torch.randn(2, 3, 40, 48)


def member(name: str = "hpx_former_pico") -> mixlab.Backbone:
    return mixlab.create_model(name, num_classes=5).eval()


def pair(**settings: object) -> mixlab.Ensemble:
    return mixlab.Ensemble([member(), member("caformer_pico")], **settings).eval()  # type: ignore[arg-type]


def test_scores_are_averaged() -> None:
    model = pair()
    with torch.no_grad():
        scores = [one(IMAGE) for one in model.members]
        torch.testing.assert_close(model(IMAGE), (scores[0] + scores[1]) / 2)
        model.average = "probabilities"
        expected = (scores[0].softmax(-1) + scores[1].softmax(-1)) / 2
        torch.testing.assert_close(model(IMAGE).softmax(-1), expected)


def test_an_ensemble_is_made_of_backbones_and_is_none() -> None:
    model = pair()
    assert isinstance(model, mixlab.Model)
    assert not isinstance(model, mixlab.Backbone)
    assert model.backbones == list(model.members)
    assert model.members[0].backbones == [model.members[0]]
    assert not hasattr(model, "class_activation")


def test_it_does_what_a_model_does() -> None:
    model = pair()
    first, second = model.members
    torch.testing.assert_close(model.embed(IMAGE), torch.cat([first.embed(IMAGE), second.embed(IMAGE)], 1))
    maps = model.pyramid(IMAGE)
    assert model.strides == first.strides
    assert tuple(level.shape[1] for level in maps) == model.channels
    names = ["members.1.stages.2", "members.0.stem"]
    assert list(model.intermediates(IMAGE, names)) == names
    assert model.explain(IMAGE, "members.0.stages.0.blocks.0")["kernels"].ndim == 3
    assert len(mixlab.PyramidAdapter(model)(IMAGE)) == 4
    assert mixlab.macs(model, 40) == mixlab.macs(first, 40) + mixlab.macs(second, 40)
    named = dict(model.named_parameters())
    listed = [name for _, names in model.layer_order for name in names]
    assert sorted(listed) == sorted(named)
    assert model.no_decay <= named.keys()
    torch.testing.assert_close(copy.deepcopy(model)(IMAGE), model(IMAGE))
    model.set_activation_checkpointing()
    model.train()(IMAGE).sum().backward()
    model.reset_classifier(7)
    assert model(IMAGE).shape == (2, 7)
    compiled = compile_blocks(copy.deepcopy(model).eval(), backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(IMAGE), model.eval()(IMAGE))


def test_it_goes_into_a_file_and_comes_back(tmp_path: Path) -> None:
    model, path = pair(average="probabilities", name="mine"), tmp_path / "m.safetensors"
    model.class_names = tuple("abcde")
    mixlab.save_weights(model, path)
    again = mixlab.create_model(weights=path).eval()
    assert isinstance(again, mixlab.Ensemble)
    assert (again.config.name, again.average, again.class_names) == ("mine", "probabilities", tuple("abcde"))
    torch.testing.assert_close(again(IMAGE), model(IMAGE))
    other = pair(average="probabilities")
    mixlab.load_weights(other, path)
    torch.testing.assert_close(other(IMAGE), model(IMAGE))
    assert mixlab.create_model(weights=path, num_classes=3)(IMAGE).shape == (2, 3)


def test_weights_of_one_model_do_not_fill_two(tmp_path: Path) -> None:
    model = pair()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(WeightsError, match=r"load_weights\(model.members\[0\]"):
        mixlab.load_weights(model, member().state_dict())
    broken = {key: value for key, value in model.state_dict().items() if key != "members.1.stem.conv.weight"}
    broken = {key: value + 1 for key, value in broken.items()}
    with pytest.raises(WeightsError, match=r"member 1, does not fit 'caformer_pico': 1 missing: stem.conv.weight"):
        mixlab.load_weights(model, broken)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_members_must_fit_together() -> None:
    with pytest.raises(ConfigError, match="same num_classes"):
        mixlab.Ensemble([member(), mixlab.create_model("caformer_pico", num_classes=4)])
    with pytest.raises(ConfigError, match="one or more Mixlab models"):
        mixlab.Ensemble([])
    mixed = mixlab.Ensemble([member(), member("vil_pico")])
    assert mixed(IMAGE).shape == (2, 5)
    with pytest.raises(ConfigError, match="PyramidAdapter around each"):
        mixed.pyramid(IMAGE)


def test_named_ensembles_take_overrides() -> None:
    with torch.device("meta"):
        model = mixlab.create_model("ensemble_hpx_conv_hb_ca_s18", num_classes=3)
    assert isinstance(model, mixlab.Ensemble)
    names = [one.config.name for one in model.members]
    assert names == ["hpx_former_s18", "convformer_s18", "hb_former_s18", "caformer_s18"]
    assert all(one.config.num_classes == 3 for one in model.members)


def test_one_member_is_an_ensemble_too_and_ensembles_do_not_nest(tmp_path: Path) -> None:
    single = mixlab.Ensemble([member()]).eval()
    mixlab.save_weights(single, tmp_path / "one.safetensors")
    torch.testing.assert_close(mixlab.create_model(weights=tmp_path / "one.safetensors").eval()(IMAGE), single(IMAGE))
    with pytest.raises(ConfigError, match="different single models"):
        mixlab.Ensemble([single, member()])  # type: ignore[list-item]
    twice = member()
    with pytest.raises(ConfigError, match="different single models"):
        mixlab.Ensemble([twice, twice])
    with pytest.raises(WeightsError, match="holds 0 members"):
        mixlab.load_weights(single, {"weight": torch.ones(3), "bias": torch.ones(3)})


def test_facts_are_those_of_the_members() -> None:
    model = pair()
    model.members[0].class_names = tuple("abcde")
    assert model.class_names == tuple("abcde")
    model.members[1].class_names = tuple("vwxyz")
    with pytest.raises(ConfigError, match="different classes"):
        _ = model.class_names
    model.reset_classifier(0)
    torch.testing.assert_close(model(IMAGE), model.embed(IMAGE))
