"""What segmenters and detectors have in common: a backbone that gives maps."""

from mixlab.models.backbone import Backbone
from mixlab.models.dense_model import HEAD as HEAD
from mixlab.models.dense_model import DenseModel as DenseModel
from mixlab.models.dense_model import TaskConfig as TaskConfig
from mixlab.models.dense_model import Trainable as Trainable


def prepare(backbone: Backbone, learned_maps: bool | None) -> bool:
    """Take the classifier off a backbone that is to give maps; whether the steps to other strides are learned.

    No map passes the final norm, and a parameter without a gradient would stop distributed training. By default the
    steps are learned where all maps have one stride.
    """
    if backbone.config.num_classes:
        backbone.reset_classifier(0)
    backbone.readout.requires_grad_(False)
    return len(set(backbone.strides)) == 1 if learned_maps is None else learned_maps
