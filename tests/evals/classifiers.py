"""Classifiers for the tests of robustness: one that reads its answer off the colour, and one that learned digits."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixlab import create_model
from mixlab.data.digits import open_digits
from mixlab.evals.quality.examine import Look, Pixels
from mixlab.evals.subjects import Subject
from mixlab.models.backbone import Backbone
from mixlab.models.config import Preprocessing

SIDE = 32


class ByColour(nn.Module):
    """The mean colour names the most likely class (red + 256 * green) and the next one (blue)."""

    def forward(self, images: Tensor) -> Tensor:
        red, green, blue = (255 * images.mean((2, 3))).round().long().unbind(1)
        scores = torch.zeros(len(images), 1000)
        scores.scatter_(1, blue[:, None], 1.0)
        return scores.scatter_(1, (red + 256 * green)[:, None], 2.0)


def by_colour(crop: float = 1.0) -> Subject:
    return Subject(
        name="by colour",
        model=ByColour(),
        image_size=(SIDE, SIDE),
        in_channels=3,
        num_classes=1000,
        preprocessing=Preprocessing(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), interpolation="nearest", crop=crop),
        trained=True,
    )


def colour(best: int, second: int = 255) -> tuple[int, int, int]:
    return best % 256, best // 256, second


def learn_digits() -> Backbone:
    """A small CAFormer after four epochs: right about most of the digits."""
    torch.manual_seed(0)
    model = create_model(
        "caformer_pico",
        num_classes=10,
        in_channels=1,
        image_size=SIDE,
        depths=[1, 1, 1, 1],
        dims=[16, 32, 48, 64],
        preprocessing={"mean": [0.5], "std": [0.5]},
    )
    data = open_digits("train")
    model.class_names = data.class_names
    pixels = Pixels(Look((SIDE, SIDE), 1, 1.0, "bicubic"))
    images = torch.stack([pixels(data.read(index)) for index in range(len(data))])
    labels = torch.tensor([data.label(index) for index in range(len(data))])
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(4):
        for chosen in torch.randperm(len(images)).split(64):
            loss = F.cross_entropy(model((images[chosen] - 0.5) / 0.5), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()
