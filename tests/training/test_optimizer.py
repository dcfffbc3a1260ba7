import math

import pytest
import torch

import mixlab
from mixlab.core.errors import ConfigError
from mixlab.training.optimizer import (
    LearningRate,
    build_optimizer,
    freeze,
    learning_rate,
    parameter_groups,
    total_updates,
)
from mixlab.training.recipe import Optimizer, Recipe, Schedule, list_recipes, load_recipe


def recipe(**changes: object) -> Recipe:
    values = {"name": "r", "optimizer": Optimizer(lr=1.0), "schedule": Schedule(epochs=10), "batch_size": 8, **changes}
    return Recipe(**values)  # type: ignore[arg-type]


def test_every_trained_parameter_is_in_one_group_and_vectors_do_not_decay() -> None:
    model = mixlab.create_model("caformer_pico")
    groups = parameter_groups(model, Optimizer(lr=1.0, weight_decay=0.3))
    listed = [id(p) for group in groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    named = dict(model.named_parameters())
    for group in groups:
        decays = {name not in model.no_decay for name, p in named.items() if any(p is one for one in group["params"])}
        assert decays == {group["weight_decay"] > 0}


def test_layer_decay_follows_the_models_own_layers_and_pairs_count_once() -> None:
    model = mixlab.create_model("vil_pico", num_classes=3)
    groups = parameter_groups(model, Optimizer(lr=1.0, layer_decay=0.5))
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    blocks = len(model.stages[0].blocks)
    assert scale[id(model.get_parameter("head.classifier.weight"))] == 1
    for block in range(blocks):
        parameter = model.get_parameter(f"stages.0.blocks.{block}.token.branches.0.mixer.up.weight")
        assert scale[id(parameter)] == 0.5 ** (blocks // 2 - block // 2)
    assert scale[id(model.get_parameter("stem.conv.weight"))] == 0.5 ** (blocks // 2 + 1)


@pytest.mark.parametrize("name", ["hpx_former_pico", "hb_former_pico"])
def test_weight_decay_touches_filters_if_the_released_training_did(name: str) -> None:
    """timm's rule there: everything that has several axes in the released code and is no bias."""
    model = mixlab.create_model(name, num_classes=2)
    named = {id(p): name for name, p in model.named_parameters()}

    def decayed(settings: Optimizer) -> set[str]:
        groups = parameter_groups(model, settings)
        return {named[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}

    released = load_recipe("hyenapixel_imagenet", model=name).optimizer
    more = decayed(released) - decayed(Optimizer(lr=1.0, weight_decay=0.05))
    parts = {"positions", "decay", "shift"} if name.startswith("hpx") else {"positions"}
    assert {path.rpartition("filter.")[2].split(".")[0] for path in more} == parts | {"frequencies"}
    assert not {path for path in decayed(released) if path.endswith((".bias", "norm.weight"))}


def test_only_the_recipes_of_hyenapixel_decay_filters() -> None:
    told = {name: load_recipe(name).optimizer.decay_filters for name in list_recipes()}
    assert {name for name, decays in told.items() if decays} == {
        *("hyenapixel_imagenet", "hyenapixel_ablation", "hyenapixel_finetune_384", "hyenapixel_finetune_512"),
        *("hyenapixel_coco_released", "hyenapixel_ade20k_released"),
    }


def test_the_rate_scales_with_the_batch_by_the_papers_divisor() -> None:
    assert learning_rate(recipe(optimizer=Optimizer(lr=5e-4, lr_divisor=512), batch_size=2048)) == pytest.approx(2e-3)
    assert learning_rate(recipe(optimizer=Optimizer(lr=5e-4), batch_size=2048)) == 5e-4


def rates(schedule: Schedule, per_epoch: int) -> list[float]:
    model = mixlab.create_model("caformer_pico", num_classes=2)
    chosen = recipe(optimizer=Optimizer(lr=1.0, layer_decay=0.5), schedule=schedule)
    optimizer = build_optimizer(model, chosen)
    plan = LearningRate(optimizer, chosen, per_epoch)
    return [plan.set(update) for update in range(total_updates(schedule, per_epoch))]


def test_a_cosine_warms_up_falls_and_cools_down() -> None:
    found = rates(Schedule(epochs=10, warmup_epochs=2, warmup_lr=0.1, min_lr=0.01, cooldown_epochs=1), 5)
    assert len(found) == 55
    for update in range(10):
        assert found[update] == pytest.approx(0.1 + 0.9 * update / 10)
    for update in range(10, 50):
        angle = math.pi * (update - 10) / 40
        assert found[update] == pytest.approx(0.01 + 0.99 * (1 + math.cos(angle)) / 2)
    assert found[50:] == pytest.approx([0.01] * 5)


def test_a_constant_rate_stays() -> None:
    assert rates(Schedule(name="constant", epochs=3), 4) == pytest.approx([1.0] * 12)
    assert rates(Schedule(updates=6, warmup_updates=2, warmup_lr=0.0), 4)[:3] == pytest.approx([0, 0.5, 1])


@pytest.mark.parametrize("name", ["adamw", "lamb", "sgd"])
def test_every_optimizer_steps(name: str) -> None:
    model = mixlab.create_model("caformer_pico", num_classes=2)
    optimizer = build_optimizer(model, recipe(optimizer=Optimizer(name=name, lr=0.1)))  # type: ignore[arg-type]
    before = model.get_parameter("head.classifier.weight").clone()
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.get_parameter("head.classifier.weight"), before)


def test_a_probe_trains_the_head_alone() -> None:
    model = mixlab.create_model("caformer_pico", num_classes=2)
    freeze(model, recipe(train_only="head"))
    assert {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad} <= {"head", "readout"}
    with pytest.raises(ConfigError, match="needs a head"):
        freeze(mixlab.create_model("caformer_pico", num_classes=0), recipe(train_only="head"))
    with pytest.raises(ConfigError, match="Nothing to train"):
        parameter_groups(model.requires_grad_(False), Optimizer(lr=1.0))


def test_a_warm_up_may_lie_over_the_beginning_of_the_decay() -> None:
    """As in timm's scripts: after 2 of 10 epochs the cosine stands where it would stand without a warm-up."""
    before, over = (
        rates(Schedule(epochs=10, warmup_epochs=2, warmup_lr=0.0, min_lr=0.0, warmup_prefix=prefix), 5)
        for prefix in (True, False)
    )
    plain = rates(Schedule(epochs=10, min_lr=0.0), 5)
    assert over[:10] == before[:10]
    assert over[10:] == pytest.approx(plain[10:])
    assert before[10] == pytest.approx(1.0)
    assert max(abs(one - other) for one, other in zip(before, over, strict=True)) > 0.05


def test_schedules_begin_as_those_of_their_authors() -> None:
    """timm's scripts lay the warm-up over the decay; Vision-LSTM's own code puts it in front."""
    told = {name: load_recipe(name).schedule for name in list_recipes()}
    warm = {name for name, one in told.items() if (one.warmup_epochs or one.warmup_updates) and one.name != "step"}
    timms = ("hyenapixel", "metaformer", "convformer", "caformer", "sequencer", "coat", "deit_")
    for name in warm - {"hyenapixel_ade20k", "hyenapixel_ade20k_released"}:
        if name.startswith((*timms, "vision_lstm", "deit3")):
            assert told[name].warmup_prefix == (not name.startswith(timms)), name
    assert told["hyenapixel_ade20k"].warmup_prefix


def test_a_polynomial_falls_to_its_end_after_the_warm_up() -> None:
    schedule = Schedule(name="polynomial", updates=50, warmup_updates=10, warmup_lr=0.0, min_lr=0.0, power=2.0)
    found = rates(schedule, 7)
    assert found[5] == pytest.approx(0.5)
    for update in range(10, 50):
        assert found[update] == pytest.approx((1 - (update - 10) / 40) ** 2)


def test_steps_come_at_the_milestones_in_the_unit_of_the_length() -> None:
    schedule = Schedule(name="step", epochs=4, milestones=(2, 3), factor=0.5, warmup_updates=5, warmup_lr=0.0)
    found = rates(schedule, 10)
    assert found[4] == pytest.approx(0.8)
    assert found[5:] == pytest.approx([1.0] * 15 + [0.5] * 10 + [0.25] * 10)
    found = rates(Schedule(name="step", updates=6, milestones=(4,)), 10)
    assert found == pytest.approx([1.0] * 4 + [0.1] * 2)


def test_the_backbone_may_learn_more_slowly_than_what_is_built_on_it() -> None:
    model = mixlab.create_segmenter("convformer_pico", num_classes=3, width=16, auxiliary_width=16)
    groups = parameter_groups(model, Optimizer(lr=1.0, backbone_scale=0.1))
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert scale[id(parameter)] == (0.1 if name.startswith("maps.backbone.") else 1.0), name
