import fnmatch
import json
import math
import re
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mixlab
from mixlab.core.errors import ConfigError
from mixlab.models.zoo import model_config, rows
from mixlab.training.recipe import Recipe, Schedule, list_recipes, load_recipe, parse_recipe, recipe_rows

# The papers' tables as printed: a row per line, a column per cell, one cell for all columns, sizes apart by "/"

METAFORMER_13 = """
                           | IdentityFormer      | RandFormer          | PoolFormerV2
Epochs                     | 300
Resolution                 | 224
Batch size                 | 4096
Optimizer                  | AdamW
Learning rate              | 4e-3
Learning rate decay        | Cosine
Warmup epochs              | 5
Weight decay               | 0.05
Rand Augment               | 9/0.5
Mixup                      | 0.8
Cutmix                     | 1.0
Erasing prob               | 0.25
Peak stochastic depth rate | 0.1/0.1/0.2/0.3/0.4 | 0.1/0.1/0.2/0.3/0.3 | 0.1/0.1/0.2/0.3/0.4
Label smoothing            | 0.1
"""
METAFORMER_14 = """
                           | ConvFormer, train | ConvFormer, finetune | CAFormer, train | CAFormer, finetune
Epochs                     | 300               | 30                   | 300             | 30
Resolution                 | 224               | 384                  | 224             | 384
Batch size                 | 4096              | 1024                 | 4096            | 1024
Optimizer                  | AdamW             | AdamW                | LAMB            | LAMB
Learning rate              | 4e-3              | 5e-5                 | 8e-3            | 1e-4
Learning rate decay        | Cosine            | None                 | Cosine          | None
Warmup epochs              | 20                | None                 | 20              | None
Weight decay               | 0.05
Rand Augment               | 9/0.5
Mixup                      | 0.8               | None                 | 0.8             | None
Cutmix                     | 1.0               | None                 | 1.0             | None
Erasing prob               | 0.25
Peak stochastic depth rate | 0.2/0.3/0.4/0.6   | 0.3/0.5/0.8/0.8      | 0.15/0.3/0.4/0.6 | 0.3/0.5/0.7/0.8
MLP head dropout rate      | 0/0/0/0           | 0.4/0.4/0.5/0.5      | 0/0.4/0.4/0.5   | 0.4/0.4/0.4/0.5
Label smoothing            | 0.1
EMA decay rate             | None              | 0.9999               | None            | 0.9999
"""
# its two finetuning resolutions, 224 and 384, are two recipes
METAFORMER_15 = """
                           | ConvFormer, pretrain | ConvFormer, finetune | CAFormer, pretrain | CAFormer, finetune
Epochs                     | 90                   | 30                   | 90                 | 30
Batch size                 | 4096                 | 1024                 | 4096               | 1024
Optimizer                  | AdamW                | AdamW                | LAMB               | LAMB
Learning rate              | 1e-3                 | 5e-5                 | 2e-3               | 1e-4
Learning rate decay        | Cosine               | None                 | Cosine             | None
Warmup epochs              | 5                    | None                 | 5                  | None
Weight decay               | 0.05
Rand Augment               | 9/0.5
Mixup                      | 0.8                  | None                 | 0.8                | None
Cutmix                     | 1.0                  | None                 | 1.0                | None
Erasing prob               | 0.25
Peak stochastic depth rate | 0/0/0.1/0.2          | 0.1/0.1/0.1/0.3      | 0.1/0.1/0.1/0.3    | 0.1/0.1/0.1/0.3
MLP head dropout rate      | 0.2/0.2/0.2/0.3      | 0.2/0.2/0.2/0.5      | 0.2/0.2/0.2/0.4    | 0.2/0.2/0.2/0.5
Label smoothing            | 0.1
EMA decay rate             | None                 | 0.9999               | None               | 0.9999
"""
# the third column's epochs, "CIFAR: 200, Others: 1000", are two recipes
SEQUENCER_6 = """
                          | S/M/L 224        | L 392      | S/M/L transfer, 224
optimizer                 | AdamW            | AdamW      | AdamW
base learning rate        | 2e-3/1.5e-3/1e-3 | 5e-5       | 1e-4
weight decay              | 0.05             | 1e-8       | 1e-4
optimizer epsilon         | 1e-8             | 1e-8       | 1e-8
optimizer momentum        | [0.9, 0.999]     | [0.9, 0.999] | [0.9, 0.999]
batch size                | 2048/1536/1024   | 512        | 512
learning rate schedule    | cosine decay     | cosine decay | cosine decay
lower learning rate bound | 1e-6             | 1e-6       | 1e-6
warmup epochs             | 20               | None       | 5
warmup learning rate      | 1e-6             | None       | 1e-6
cooldown epochs           | 10               | None       | 10
crop ratio                | 0.875            | 1.0        | 0.875
randaugment               | 9/0.5            | 9/0.5      | 9/0.5
mixup alpha               | 0.8              | 0.8        | 0.8
cutmix alpha              | 1.0              | 1.0        | 1.0
random erasing            | 0.25             | 0.25       | None
label smoothing           | 0.1              | 0.1        | 0.1
stochastic depth          | 0.1/0.2/0.4      | 0.4        | 0.1/0.2/0.4
gradient clip             | None             | None       | 1
"""
# the arrow of the paper, from the first phase to the second, is the column; T, S and B are "/"
VISION_LSTM_10 = """
                           | pre-training | fine-tuning
Epochs                     | 800/400/400  | 20/20/5
Batch size                 | 2048         | 1024
Peak rate                  | 0/0.05/0.2
Layer-wise decay (depth)   | None
Optimizer                  | AdamW
Base learning rate         | 1e-3         | 1e-5
Linear LR scaling divisor  | 1024
Weight decay               | 0.05
Momentum                   | [0.9, 0.999]
Gradient norm clip         | 1.0
Precision                  | mixed bfloat16
Learning rate schedule     | cosine decay
Warmup epochs              | 5/5/5        | 5/5/1
End LR                     | 1e-6
Label smoothing            | None
RandomResizedCrop          | 192          | 224
Scale                      | [0.08, 1.0]
Interpolation              | bicubic
RandomHorizontalFlip       | 0.5
3-Augment                  | yes
ColorJitter                | [0.3, 0.3, 0.3, 0.0]
Mixup alpha                | 0.8
Cutmix alpha               | 1.0
CenterCrop of a Resize     | 1.0
"""
VISION_LSTM_11 = """
                       | VTAB-1K
Epochs                 | 50
Batch size             | 64
Seeds                  | 5
Optimizer              | AdamW
Learning rates         | [1e-3, 7.5e-4, 5.0e-4, 2.5e-4, 1.0e-4]
Layer-wise lr decay    | 0.65
Weight decay           | 0.05
Momentum               | [0.9, 0.999]
Learning rate schedule | cosine decay
Warmup epochs          | 5
Precision              | mixed bfloat16
Whole image            | squash
Interpolation          | bicubic
Resolution             | 224
RandomHorizontalFlip   | 0
3-Augment              | None
Mixup alpha            | None
Cutmix alpha           | None
"""
VISION_LSTM_12 = """
                         | ADE20K
Updates                  | 160000
Batch size               | 16
Auxiliary weight         | 0.4
Auxiliary dimension      | 192/384/384
Decoder dimension        | 192/384/384
Peak rate                | 0/0.05/0.1
Layer-wise decay (depth) | yes
Optimizer                | AdamW
Base learning rate       | 5e-4
Linear LR scaling divisor | 16
Layer-wise lr decay      | 0.65
Weight decay             | 0.05
Momentum                 | [0.9, 0.999]
Learning rate schedule   | cosine decay
Warmup updates           | 1500
Precision                | mixed float16
Interpolation            | bicubic
Resolution               | 512
ColorJitter probability  | 0.5
ColorJitter              | [0.5, 0.5, 0.5, 0.25]
Stride                   | 341
Scale factors            | [0.75, 1.0, 1.25, 1.5, 1.75]
"""
VISION_LSTM_13 = """
                           | pre-training | fine-tuning
Epochs                     | 800          | 20
Batch size                 | 2048         | 1024
Peak rate                  | 0
Optimizer                  | AdamW
Base learning rate         | 1e-3         | 1e-5
Linear LR scaling divisor  | 1024
Weight decay               | 0.05
Momentum                   | [0.9, 0.999]
Gradient norm clip         | None
Precision                  | mixed bfloat16
Learning rate schedule     | cosine decay
Warmup epochs              | 5
End LR                     | 1e-6
Label smoothing            | None
RandomResizedCrop          | 192          | 224
Scale                      | [0.08, 1.0]
Interpolation              | bicubic
RandomHorizontalFlip       | 0.5
3-Augment                  | yes
ColorJitter                | [0.3, 0.3, 0.3, 0.0]
Mixup alpha                | 0.8
Cutmix alpha               | 1.0
CenterCrop of a Resize     | 1.0
"""
# section 4.1, its two paragraphs, and 4.2; S is every size but B36
HYENAPIXEL = """
                           | training   | fine-tuning | ablation
Optimizer                  | AdamW      | AdamW       | AdamW
Batch size                 | 4096       | 1024        | 4096
Learning rate              | 4e-3       | 5e-5        | 4e-3
Weight decay               | 0.05
Epochs in all              | 310        | 30          | 160
Warmup epochs              | 20         | None        | 20
cooldown epochs            | 10         | None        | 10
Learning rate decay        | Cosine     | None        | Cosine
Label smoothing            | 0.1
Rand Augment               | 9/0.5
Mixup                      | 0.8        | None        | 0.8
Cutmix                     | 1.0        | None        | 1.0
Erasing prob               | 0.25
EMA decay rate             | None       | 0.9999      | None
MLP head dropout rate      | 0          | 0.4         | 0
"""
COAT = """
                           | section 6.1
Resolution                 | 224
Epochs                     | 300
Batch size                 | 2048
Precision                  | mixed float16
Optimizer                  | AdamW
Learning rate decay        | Cosine
Warmup epochs              | 5
Weight decay               | 0.05
Base learning rate         | 5e-4
Linear LR scaling divisor  | 512
Rand Augment               | 9/0.5
Mixup                      | 0.8
Cutmix                     | 1.0
Erasing prob               | 0.25
Repeated augmentation      | 3
Label smoothing            | 0.1
Peak stochastic depth rate | 0
"""

READ: dict[str, Callable[[Recipe], Any]] = {
    "3-augment": lambda r: r.augmentation.three_augment or None,
    "auxiliary dimension": lambda r: r.segmentation and r.segmentation.auxiliary_width,
    "auxiliary weight": lambda r: r.segmentation and r.segmentation.auxiliary_weight,
    "base learning rate": lambda r: r.optimizer.lr,
    "batch size": lambda r: r.batch_size,
    "centercrop of a resize": lambda r: r.eval_crop,
    "colorjitter": lambda r: r.augmentation.jitter,
    "colorjitter probability": lambda r: r.augmentation.jitter_probability,
    "cooldown epochs": lambda r: r.schedule.cooldown_epochs or None,
    "crop ratio": lambda r: r.eval_crop,
    "cutmix": lambda r: r.augmentation.cutmix or None,
    "cutmix alpha": lambda r: r.augmentation.cutmix or None,
    "decoder dimension": lambda r: r.segmentation and r.segmentation.width,
    "ema decay rate": lambda r: r.ema_decay,
    "end lr": lambda r: r.schedule.min_lr,
    "epochs": lambda r: r.schedule.epochs,
    "epochs in all": lambda r: (r.schedule.epochs or 0) + r.schedule.cooldown_epochs,
    "erasing prob": lambda r: r.augmentation.erasing or None,
    "gradient clip": lambda r: r.optimizer.clip_norm,
    "gradient norm clip": lambda r: r.optimizer.clip_norm,
    "interpolation": lambda r: r.augmentation.interpolation,
    "label smoothing": lambda r: r.augmentation.label_smoothing or None,
    "layer-wise decay (depth)": lambda r: r.drop_path_schedule == "ramp" or None,
    "layer-wise lr decay": lambda r: r.optimizer.layer_decay,
    "learning rate": lambda r: r.optimizer.lr,
    "learning rate decay": lambda r: None if r.schedule.name == "constant" else r.schedule.name,
    "learning rate schedule": lambda r: f"{r.schedule.name} decay",
    "learning rates": lambda r: r.sweep and r.sweep.lr,
    "linear lr scaling divisor": lambda r: r.optimizer.lr_divisor,
    "lower learning rate bound": lambda r: r.schedule.min_lr,
    "mixup": lambda r: r.augmentation.mixup or None,
    "mixup alpha": lambda r: r.augmentation.mixup or None,
    "mlp head dropout rate": lambda r: r.head_dropout,
    "momentum": lambda r: r.optimizer.betas,
    "optimizer": lambda r: r.optimizer.name,
    "optimizer epsilon": lambda r: r.optimizer.eps,
    "optimizer momentum": lambda r: r.optimizer.betas,
    "peak rate": lambda r: r.drop_path,
    "peak stochastic depth rate": lambda r: r.drop_path,
    "precision": lambda r: {"bf16": "mixed bfloat16", "float16": "mixed float16"}[r.precision],
    "rand augment": lambda r: r.augmentation.randaugment,
    "randaugment": lambda r: r.augmentation.randaugment,
    "random erasing": lambda r: r.augmentation.erasing or None,
    "randomhorizontalflip": lambda r: r.augmentation.flip,
    "randomresizedcrop": lambda r: r.image_size if r.augmentation.crop == "random_resized" else None,
    "repeated augmentation": lambda r: r.augmentation.repeats,
    "resolution": lambda r: r.image_size,
    "scale": lambda r: r.augmentation.scale,
    "scale factors": lambda r: r.segmentation and r.segmentation.scales,
    "seeds": lambda r: r.sweep and r.sweep.seeds,
    "stochastic depth": lambda r: r.drop_path,
    "stride": lambda r: r.segmentation and r.segmentation.stride,
    "updates": lambda r: r.schedule.updates,
    "warmup epochs": lambda r: r.schedule.warmup_epochs or None,
    "warmup learning rate": lambda r: r.schedule.warmup_lr if r.schedule.warmup_epochs else None,
    "warmup updates": lambda r: r.schedule.warmup_updates,
    "weight decay": lambda r: r.optimizer.weight_decay,
    "whole image": lambda r: r.augmentation.crop,
}
WORDS = {"None": None, "yes": True, "9/0.5": "rand-m9-mstd0.5-inc1"}


def column(table: str, index: int) -> dict[str, str]:
    lines = [[cell.strip() for cell in line.split("|")] for line in table.strip("\n").splitlines()[1:]]
    return {label.lower(): cells[index if len(cells) > 1 else 0] for label, *cells in lines}


def value(printed: str, size: int, sizes: int) -> Any:
    """A cell, or its part for one of the sizes, as a value."""
    if printed in WORDS:
        return WORDS[printed]
    printed = printed.split("/")[size] if printed.count("/") == sizes - 1 > 0 else printed
    try:
        return json.loads(printed)
    except json.JSONDecodeError:
        return printed.lower()


META, CONV = ["s12", "s24", "s36", "m36", "m48"], ["s18", "s36", "m36", "b36"]
SEQUENCERS, VIL = ["sequencer2d_s", "sequencer2d_m", "sequencer2d_l"], ["vil_tiny", "vil_small", "vil_base"]
CONVFORMERS, CAFORMERS = ([f"{family}_{size}" for size in CONV] for family in ("convformer", "caformer"))
DEIT = ["deit_tiny", "deit_small", "deit_base"]
# recipe, table, column and the models in the order of the cells' sizes
COLUMNS = [
    *(
        ("metaformer_baseline_imagenet", METAFORMER_13, index, [f"{family}_{size}" for size in META])
        for index, family in enumerate(("identityformer", "randformer", "poolformerv2"))
    ),
    ("convformer_imagenet", METAFORMER_14, 0, CONVFORMERS),
    ("convformer_imagenet_384", METAFORMER_14, 1, CONVFORMERS),
    ("caformer_imagenet", METAFORMER_14, 2, CAFORMERS),
    ("caformer_imagenet_384", METAFORMER_14, 3, CAFORMERS),
    ("convformer_imagenet21k", METAFORMER_15, 0, CONVFORMERS),
    ("convformer_from21k", METAFORMER_15, 1, CONVFORMERS),
    ("convformer_from21k_384", METAFORMER_15, 1, CONVFORMERS),
    ("caformer_imagenet21k", METAFORMER_15, 2, CAFORMERS),
    ("caformer_from21k", METAFORMER_15, 3, CAFORMERS),
    ("caformer_from21k_384", METAFORMER_15, 3, CAFORMERS),
    ("sequencer_imagenet", SEQUENCER_6, 0, SEQUENCERS),
    ("sequencer_imagenet_392", SEQUENCER_6, 1, ["sequencer2d_l"]),
    ("sequencer_transfer", SEQUENCER_6, 2, SEQUENCERS),
    ("sequencer_transfer_cifar", SEQUENCER_6, 2, SEQUENCERS),
    ("sequencer_transfer_flowers", SEQUENCER_6, 2, SEQUENCERS),
    ("vision_lstm_imagenet_192", VISION_LSTM_10, 0, VIL),
    ("vision_lstm_imagenet_224", VISION_LSTM_10, 1, VIL),
    ("vision_lstm_vtab", VISION_LSTM_11, 0, VIL),
    ("vision_lstm_vtab", VISION_LSTM_11, 0, DEIT),
    ("vision_lstm_ade20k", VISION_LSTM_12, 0, VIL),
    ("vision_lstm_ade20k", VISION_LSTM_12, 0, DEIT),
    ("deit3_imagenet_192", VISION_LSTM_13, 0, ["deit3_tiny"]),
    ("deit3_imagenet_224", VISION_LSTM_13, 1, ["deit3_tiny"]),
    ("hyenapixel_imagenet", HYENAPIXEL, 0, ["hpx_former_s18", "hb_former_b36"]),
    ("hyenapixel_finetune_384", HYENAPIXEL, 1, ["hpx_former_s18"]),
    ("hyenapixel_finetune_512", HYENAPIXEL, 1, ["hpx_former_s18"]),
    ("hyenapixel_ablation", HYENAPIXEL, 2, ["hpx_former_s12", "convformer_s4"]),
    ("coat_imagenet", COAT, 0, ["coat_tiny", "coat_mini", "coat_lite_small"]),
]

# what the papers say outside of their tables
STATED = [
    ("convformer_from21k", "convformer_s18", "image_size", 224),
    ("convformer_from21k_384", "convformer_s18", "image_size", 384),
    ("caformer_from21k", "caformer_s18", "image_size", 224),
    ("caformer_from21k_384", "caformer_b36", "image_size", 384),
    ("sequencer_imagenet", "sequencer2d_s", "image_size", 224),
    ("sequencer_imagenet_392", "sequencer2d_l", "image_size", 392),
    ("sequencer_transfer", "sequencer2d_m", "schedule.epochs", 1000),
    ("sequencer_transfer_cifar", "sequencer2d_m", "schedule.epochs", 200),
    ("sequencer_imagenet", "sequencer2d_l_x1_3", "batch_size", 1024),
    ("sequencer_imagenet", "v_sequencer_s_pe", "drop_path", 0.1),
    ("vision_lstm_ablation_100", "vil_tiny", "schedule.epochs", 100),
    ("vision_lstm_ablation_100", "vil_tiny", "image_size", 224),
    ("vision_lstm_ablation_100", "vil_tiny", "drop_path", 0),
    ("vision_lstm_ablation_400", "vil_tiny", "schedule.epochs", 400),
    ("vision_lstm_ablation_400", "vil_tiny", "image_size", 192),
    ("deit3_ablation_400", "deit3_tiny", "schedule.epochs", 400),
    ("vision_lstm_ablation_ade20k", "vil_tiny", "schedule.updates", 40_000),
    ("vision_lstm_ablation_ade20k", "vil_tiny", "segmentation.decoder", "linear"),
    ("vision_lstm_ablation_ade20k", "vil_tiny", "batch_size", 16),
    ("hyenapixel_imagenet", "hpx_former_s18", "schedule.min_lr", 1e-5),
    ("hyenapixel_imagenet", "hpx_former_s18", "drop_path", 0.2),
    ("hyenapixel_imagenet", "hb_former_b36", "drop_path", 0.6),
    ("hyenapixel_ablation", "hpx_former_s12", "drop_path", 0.2),
    ("hyenapixel_finetune_384", "hpx_former_s18", "image_size", 384),
    ("hyenapixel_finetune_384", "hpx_former_s18", "drop_path", 0.2),  # the authors' script
    ("hyenapixel_finetune_512", "hpx_former_s18", "drop_path", 0.2),
    ("hyenapixel_finetune_512", "hpx_former_s18", "image_size", 512),
    # MetaFormer 3.2 and 3.3; HyenaPixel 4.3; CoaT 6.1
    ("metaformer_ade20k", "convformer_s18", "batch_size", 16),
    ("metaformer_ade20k", "convformer_s18", "schedule.updates", 160_000),
    ("metaformer_ade20k", "convformer_s18", "image_size", 512),
    ("metaformer_ade20k", "convformer_s18", "optimizer.name", "adamw"),
    ("metaformer_coco", "convformer_s18", "schedule.epochs", 36),
    ("metaformer_coco", "convformer_s18", "optimizer.name", "adamw"),
    ("hyenapixel_ade20k", "hpx_former_s18", "batch_size", 16),
    ("hyenapixel_ade20k", "hpx_former_s18", "schedule.updates", 160_000),
    ("hyenapixel_ade20k", "hpx_former_s18", "optimizer.lr", 1e-4),
    ("hyenapixel_ade20k", "hpx_former_s18", "drop_path", 0.4),
    ("hyenapixel_coco", "hpx_former_s18", "batch_size", 16),
    ("hyenapixel_coco", "hpx_former_s18", "optimizer.lr", 2e-5),
    ("hyenapixel_coco", "hpx_former_s18", "drop_path", 0.4),
    ("hyenapixel_coco", "hpx_former_s18", "schedule.epochs", 36),
    ("hyenapixel_coco", "hpx_former_s18", "schedule.milestones", (27, 33)),
    ("hyenapixel_coco", "hpx_former_s18", "schedule.factor", 0.5),
    ("hyenapixel_coco", "hpx_former_s18", "detection.shorter", tuple(range(480, 801, 32))),
    ("hyenapixel_coco", "hpx_former_s18", "detector.longer", 1333),
    ("hyenapixel_coco", "hpx_former_s18", "detector.kind", "cascade_mask_rcnn"),
    ("hyenapixel_coco", "hpx_former_s18", "detector.norms", True),
    ("hyenapixel_coco_released", "hpx_former_s18", "optimizer.lr", 2e-4),
    ("hyenapixel_coco_released", "hpx_former_s18", "optimizer.layer_decay", 0.7),
    ("hyenapixel_coco_released", "hpx_former_s18", "schedule.warmup_updates", 1000),
    ("hyenapixel_coco_released", "hpx_former_s18", "schedule.factor", 0.1),
    ("hyenapixel_coco_released", "hpx_former_s18", "detection.crop", 0.5),
    ("hyenapixel_ade20k_released", "hpx_former_s18", "optimizer.lr", 1e-4),
    ("hyenapixel_ade20k_released", "hpx_former_s18", "optimizer.weight_decay", 0.05),
    ("hyenapixel_ade20k_released", "hpx_former_s18", "optimizer.layer_decay", 0.7),
    ("coat_coco_1x", "coat_mini", "optimizer.name", "sgd"),
    ("coat_coco_1x", "coat_mini", "optimizer.lr", 0.02),
    ("coat_coco_1x", "coat_mini", "schedule.updates", 90_000),
    ("coat_coco_3x", "coat_mini", "schedule.updates", 270_000),
    ("coat_coco_3x", "coat_mini", "detector.kind", "mask_rcnn"),
    ("coat_deformable_detr", "coat_lite_small", "schedule.epochs", 50),
    ("coat_deformable_detr", "coat_lite_small", "schedule.milestones", (40,)),
    ("coat_deformable_detr", "coat_lite_small", "schedule.factor", 0.1),
    ("coat_deformable_detr", "coat_lite_small", "optimizer.lr", 2e-4),
    ("coat_deformable_detr", "coat_lite_small", "optimizer.betas", (0.9, 0.999)),
]


@pytest.mark.parametrize(
    ("name", "table", "index", "size", "models"),
    [
        pytest.param(name, table, index, size, models, id=f"{name}-{models[size]}")
        for name, table, index, models in COLUMNS
        for size in range(len(models))
    ],
)
def test_values_are_those_of_the_papers_table(name: str, table: str, index: int, size: int, models: list[str]) -> None:
    recipe = load_recipe(name, model=models[size])
    for label, printed in column(table, index).items():
        expected = value(printed, size, len(models))
        given = READ[label](recipe)
        if table == SEQUENCER_6 and label == "base learning rate":  # printed after scaling (section 4.1)
            given *= recipe.batch_size / (recipe.optimizer.lr_divisor or recipe.batch_size)
        given = list(given) if isinstance(given, tuple) else given
        assert given == (pytest.approx(expected) if isinstance(expected, (float, list)) else expected), label


@pytest.mark.parametrize(("name", "model", "key", "expected"), STATED)
def test_values_are_those_of_the_papers_text(name: str, model: str, key: str, expected: Any) -> None:
    found: Any = load_recipe(name, model=model)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == expected


def test_every_published_recipe_has_a_table_or_a_statement_here() -> None:
    ours = {name for name in list_recipes() if load_recipe(name).source.startswith("Mixlab")}
    small = {"from_scratch_small", "segmentation_small", "detection_small", "digits"}
    assert ours == {"finetune", "linear_probe", *small}
    deit = {"deit_imagenet"}  # the procedure that CoaT names
    assert {name for name, *_ in COLUMNS} | {name for name, *_ in STATED} | ours | deit == set(list_recipes())


def test_coat_is_deit_without_stochastic_depth_in_larger_batches() -> None:
    coat, deit = (load_recipe(name).plain() for name in ("coat_imagenet", "deit_imagenet"))
    assert {key for key in {*coat, *deit} if coat.get(key) != deit.get(key)} == {
        *("name", "source", "batch_size", "drop_path", "drop_path_schedule")
    }


@pytest.mark.parametrize(
    ("name", "base", "changed"),
    [
        ("vision_lstm_ablation_100", "vision_lstm_imagenet_192", {"schedule", "image_size"}),
        ("vision_lstm_ablation_400", "vision_lstm_imagenet_192", {"schedule"}),
        ("deit3_ablation_400", "deit3_imagenet_192", {"schedule"}),
        ("vision_lstm_ablation_ade20k", "vision_lstm_ade20k", {"schedule", "segmentation"}),
        ("hyenapixel_ablation", "hyenapixel_imagenet", {"schedule"}),
        ("hyenapixel_finetune_512", "hyenapixel_finetune_384", {"image_size"}),
        ("coat_coco_3x", "coat_coco_1x", {"schedule"}),
    ],
)
def test_shorter_settings_change_only_what_the_paper_says(name: str, base: str, changed: set[str]) -> None:
    ours, theirs = (load_recipe(recipe, model="vil_tiny").plain() for recipe in (name, base))
    assert {key for key in ours if ours[key] != theirs.get(key)} - {"name", "source"} == changed


@pytest.mark.parametrize("name", list_recipes())
class TestEveryRecipe:
    def test_names_its_source(self, name: str) -> None:
        source = load_recipe(name).source
        assert re.search(r"Table \d+|section \d|^Mixlab, not from a paper$", source), source

    def test_parses_for_every_model_and_has_no_pattern_without_one(self, name: str) -> None:
        for model in mixlab.list_models():
            assert load_recipe(name, model=model).name == name
        for pattern in recipe_rows()[name].get("models", {}):
            assert fnmatch.filter(mixlab.list_models(), pattern), pattern

    def test_plain_data_parses_back(self, name: str) -> None:
        recipe = load_recipe(name, model="caformer_s18")
        assert parse_recipe(json.loads(json.dumps(recipe.plain())), "a copy") == recipe


CITED = ("deit3_small", "deit3_base")  # by Vision-LSTM, which trained deit3_tiny alone; their paper is none of ours


@pytest.mark.parametrize("model", mixlab.list_models())
def test_every_model_names_a_recipe(model: str) -> None:
    row = rows()[model]
    if "members" in row or model in CITED:
        assert "recipe" not in row
    else:
        assert row["recipe"] in list_recipes()
        assert (row["recipe"] == "from_scratch_small") == model.endswith("_pico")


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("poolformerv2_m48", "metaformer_baseline_imagenet"),
        ("identityformer_s_iso", "metaformer_baseline_imagenet"),
        ("convformer_s18", "convformer_imagenet"),
        ("convformer_s4", "hyenapixel_ablation"),
        ("caformer_b36", "caformer_imagenet"),
        ("gru_sequencer2d_s", "sequencer_imagenet"),
        ("vil_base", "vision_lstm_imagenet_192"),
        ("deit_small", "deit_imagenet"),
        ("deit3_tiny", "deit3_imagenet_192"),
        ("hpx_former_s12", "hyenapixel_ablation"),
        ("hb_former_b36", "hyenapixel_imagenet"),
        ("coat_lite_tiny", "coat_imagenet"),
    ],
)
def test_a_models_recipe_is_its_papers(model: str, recipe: str) -> None:
    assert model_config(model).recipe == recipe


def test_another_recipe_does_not_make_another_model(tmp_path: Path) -> None:
    model = mixlab.create_model("caformer_pico", recipe="digits")
    mixlab.save_weights(model, tmp_path / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mixlab.create_model("caformer_pico", weights=tmp_path / "model.safetensors")


def test_the_digits_are_never_mirrored_and_the_probe_trains_the_head_alone() -> None:
    assert load_recipe("digits").augmentation.flip == 0
    assert load_recipe("linear_probe").train_only == "head"


def test_changes_come_after_the_models_own_entries() -> None:
    recipe = load_recipe("caformer_imagenet", model="caformer_b36", changes={"drop_path": 0.1, "optimizer.lr": 1})
    assert (recipe.drop_path, recipe.optimizer.lr, recipe.head_dropout) == (0.1, 1.0, 0.5)
    assert recipe.optimizer.name == "lamb"


def test_changes_may_be_nested_and_leave_the_published_recipe_alone() -> None:
    before = load_recipe("digits")
    changed = load_recipe("digits", changes={"augmentation": {"mixup": 0.2}, "sweep.lr": [1e-3, 1e-4]})
    assert changed.augmentation.mixup == 0.2
    assert changed.augmentation.padding == before.augmentation.padding
    assert changed.sweep is not None
    assert changed.sweep.lr == (1e-3, 1e-4)
    assert load_recipe("digits") == before


def test_none_takes_an_optional_value_away() -> None:
    assert load_recipe("digits", changes={"optimizer.clip_norm": "none"}).optimizer.clip_norm is None


def test_updates_replace_epochs_and_the_other_way_round() -> None:
    updates = load_recipe("digits", changes={"schedule.updates": 50, "schedule.warmup_updates": 5}).schedule
    assert (updates.epochs, updates.updates, updates.warmup_epochs, updates.warmup_updates) == (None, 50, 0, 5)
    epochs = load_recipe("vision_lstm_ade20k", changes={"schedule.epochs": 3, "schedule.warmup_epochs": 1}).schedule
    assert (epochs.epochs, epochs.updates, epochs.warmup_epochs, epochs.warmup_updates) == (3, None, 1, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer.lrr": 1e-3}, "'lr'"),
        ({"optimzer.lr": 1e-3}, "'optimizer'"),
        ({"batchsize": 3}, "'batch_size'"),
        ({"augmentation.cut_mix": 1.0}, "'cutmix'"),
        ({"schedule.warmup.epochs": 1}, "'schedule'"),
        ({"": 1}, "Unknown key ''"),
        ({"optimizer": "adamw", "optimizer.lr": 1e-3}, "must be a table"),
        ({"optimizer.name": "adam"}, "'adamw'"),
        ({"optimizer.lr": "fast"}, "a number"),
        ({"optimizer.lr": 0}, "above 0"),
        ({"optimizer.lr": math.nan}, "above 0"),
        ({"optimizer.lr": math.inf}, "above 0"),
        ({"optimizer.lr": "none"}, "a number"),
        ({"optimizer.lr_divisor": 0}, "lr_divisor"),
        ({"optimizer.weight_decay": -0.1}, "weight_decay"),
        ({"optimizer.betas": [0.9]}, "two betas"),
        ({"optimizer.betas": [0.9, 1.0]}, "two betas"),
        ({"optimizer.eps": 0}, "eps"),
        ({"optimizer.clip_norm": 0}, "clip_norm"),
        ({"optimizer.layer_decay": 1.5}, "layer_decay"),
        ({"schedule.epochs": 0}, "1 or more epochs"),
        ({"schedule.epochs": 1}, "warmup_epochs within the 1 epochs"),
        ({"schedule.epochs": 5, "schedule.updates": 5}, "either epochs or updates"),
        ({"schedule.updates": 5, "schedule.warmup_updates": 6}, "warmup_updates within the 5 updates"),
        ({"schedule.warmup_epochs": 1, "schedule.warmup_updates": 1}, "not both"),
        ({"schedule.cooldown_epochs": -1}, "0 or more"),
        ({"schedule.min_lr": -1e-6}, "min_lr"),
        ({"augmentation.flip": 1.5}, "flip"),
        ({"augmentation.label_smoothing": 1.0}, "label_smoothing"),
        ({"augmentation.scale": [1.0, 0.5]}, "rising pair"),
        ({"augmentation.scale": [0.5, 2.0]}, "up to 1"),
        ({"augmentation.padding": -0.1}, "padding"),
        ({"augmentation.mixup": -1}, "mixup"),
        ({"augmentation.jitter": [0.3]}, "four numbers"),
        ({"augmentation.randaugment": "9/0.5"}, "rand-m9"),
        ({"augmentation.randaugment": "rand-m9", "augmentation.three_augment": True}, "not both"),
        ({"augmentation.repeats": 0}, "repeats"),
        ({"sweep.seeds": 3}, "needs lr"),
        ({"sweep.lr": []}, "learning rates"),
        ({"sweep.lr": [1e-3], "sweep.seeds": 0}, "seeds"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 1.5}, "a whole number"),
        ({"ema_decay": 1}, "ema_decay"),
        ({"eval_crop": 0}, "eval_crop"),
        ({"eval_crop_mode": "fold"}, "'center', 'squash'; got 'fold'"),
        ({"eval_image_size": 0}, "eval_image_size of 1 px or more"),
        ({"optimizer.decay_filters": "maybe"}, "true or false; got 'maybe'"),
        ({"optimizer.layer_groups": "swin"}, "'blocks', 'convnext'; got 'swin'"),
        ({"optimizer.rate_factors": [["*.offsets.*"]]}, "rate_factors such as"),
        ({"schedule.warmup_prefix": "maybe"}, "true or false; got 'maybe'"),
        ({"drop_path": 1}, "drop_path"),
        ({"head_dropout": -0.1}, "head_dropout"),
        ({"image_size": 0}, "image_size"),
        ({"precision": "fp16"}, "'float16'"),
    ],
)
def test_a_wrong_change_is_an_error_that_says_what_is_wanted(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_recipe("digits", changes=changes)


def test_an_unknown_recipe_lists_near_misses() -> None:
    with pytest.raises(ConfigError, match=r"'caformer_imagenet'.*\.toml"):
        load_recipe("caformer_imagenett")


OWN = """
source = "me"
batch_size = 8
[optimizer]
lr = 0.1
[schedule]
epochs = 2
[models."caformer_*".optimizer]
lr = 0.2
[models.caformer_b36]
optimizer.lr = 0.3
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "own.toml"
    path.write_text(text)
    return path


def test_a_users_file_works_and_later_patterns_win(tmp_path: Path) -> None:
    path = write(tmp_path, OWN)
    rates = [load_recipe(path, model=model).optimizer.lr for model in ("vil_pico", "caformer_s18", "caformer_b36")]
    assert rates == [0.1, 0.2, 0.3]
    assert load_recipe(str(path)).name == "own"
    assert load_recipe(path).schedule == Schedule(epochs=2)


def test_a_users_file_on_a_published_base_wins_over_what_the_base_says_for_a_model(tmp_path: Path) -> None:
    path = write(tmp_path, 'base = "caformer_imagenet"\ndrop_path = 0.05\noptimizer.lr = 1e-3\n')
    ours, theirs = load_recipe(path, model="caformer_b36"), load_recipe("caformer_imagenet", model="caformer_b36")
    assert (ours.drop_path, ours.optimizer.lr) == (0.05, 1e-3)
    assert (ours.head_dropout, ours.optimizer.name, ours.schedule) == (0.5, "lamb", theirs.schedule)


def test_a_resolved_recipe_is_the_same_from_its_own_file(tmp_path: Path) -> None:
    recipe = load_recipe("caformer_imagenet", model="caformer_b36", changes={"drop_path": 0.1})
    lines = [f"{key} = {json.dumps(value)}" for key, value in recipe.plain().items() if not isinstance(value, dict)]
    for part, entries in recipe.plain().items():
        if isinstance(entries, dict):
            lines += [f"[{part}]", *(f"{key} = {json.dumps(value)}" for key, value in entries.items())]
    path = write(tmp_path, "\n".join(lines))
    assert tomllib.loads(path.read_text()) == recipe.plain()
    assert load_recipe(path, model="caformer_b36") == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size = ", "is not a TOML file"),
        ("", "needs optimizer, schedule, batch_size"),
        (OWN.replace("lr = 0.1", "eps = 1e-8"), "needs lr"),
        (OWN.replace("batch_size", "batch_sise"), "'batch_size'"),
        (OWN.replace("[schedule]", "[schedul]"), "'schedule'"),
        (OWN.replace("optimizer.lr = 0.3", "optimizer.lt = 0.3"), "'caformer_b36'"),
        ('base = "caformer_imagnet"', "'caformer_imagenet'"),
        ("base = 3", "Unknown base 3"),
        ("models = 3", "must be tables"),
        ("models.vil_pico = 3", "must be tables"),
        ("optimizer = 3\nbatch_size = 3\nschedule.epochs = 3", "must be Optimizer"),
    ],
)
def test_a_broken_file_is_an_error_for_every_model(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_recipe(write(tmp_path, text))


def test_files_that_cannot_be_read_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_recipe(tmp_path / "missing.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recipe(tmp_path / "folder.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not a TOML file"):
        load_recipe(tmp_path / "binary.toml")


def test_options_of_the_model_go_with_a_recipe_and_add_up(tmp_path: Path) -> None:
    plain = load_recipe("segmentation_small", model="vil_pico")
    mine = load_recipe("segmentation_small", model="caformer_pico", changes={"model": {"drop_path": 0.1}})
    assert plain.model == {}
    assert mine.model["init"] == "xavier_lecun"
    assert mine.model["stem"]["stride"] == 4
    assert mine.model["drop_path"] == 0.1
    assert load_recipe("segmentation_small", model="caformer_pico").model.keys() == {"init", "stem"}
