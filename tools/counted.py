"""Tables of the documentation that follow from counting alone, behind marks such as `<!-- counted: mixers -->`.

python -m tools.counted docs/*.md     # writes them anew into the pages that have their marks
"""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import mixlab
from mixlab.core.files import write_whole
from mixlab.evals.cost.compute import TFLOPS, training_compute
from mixlab.models.zoo import create_model
from mixlab.training.fits import bytes_per_image
from mixlab.training.recipe import load_recipe

FRAME = "convformer_s18"
MIXERS = (
    *("identity", "pool", "sepconv", "random", "convattention", "window_attention", "attention", "rnn2d", "mlstm"),
    *("hyena_bidirectional", "hyena_pixel"),
)
SIZES = (224, 512, 1024)
TRAININGS = {
    "caformer_s18": ("caformer_imagenet",),
    "caformer_b36": ("caformer_imagenet",),
    "sequencer2d_l": ("sequencer_imagenet",),
    "vil_base": ("vision_lstm_imagenet_192", "vision_lstm_imagenet_224"),
    "hpx_former_s18": ("hyenapixel_imagenet",),
    "coat_lite_small": ("coat_imagenet",),
}
MICRO = 64  # images at once on a GPU
LINKS = {8: 100e9, 64: 20e9}  # GPUs, and bytes per second from each to the others
MARK = re.compile(r"(<!-- counted: (\w+) -->\n)((?:\|.*\n)*)")


def parameters(model: torch.nn.Module, *, trainable: bool) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable)


def mixer_row(mixer: str) -> list[str]:
    """A frame with separable convolutions in front of the mixer, built for each size."""
    counts, size_of = [], 0
    for size in SIZES:
        with torch.device("meta"):
            model = create_model(FRAME, mixers=["sepconv", "sepconv", mixer, mixer], image_size=size)
        size_of = size_of or parameters(model, trainable=True)
        counts.append(f"{mixlab.macs(model, size) / 1e9:.1f}")
    return [f"`{mixer}`", f"{size_of / 1e6:.1f}", *counts]


def training_row(name: str) -> list[str]:
    """Memory and time of a training by the formulas of docs/scale.md."""
    with torch.device("meta"):
        model = create_model(name)
    size, kept = parameters(model, trainable=False), bytes_per_image(model, (224, 224))
    phases = [training_compute(name, recipe, form="mask") for recipe in TRAININGS[name]]
    hours = sum(phase.gpu_hours(TFLOPS) for phase in phases)
    batches = [load_recipe(recipe, model=name).batch_size for recipe in TRAININGS[name]]
    updates = sum(phase.images * phase.epochs / batch for phase, batch in zip(phases, batches, strict=True))
    row = [f"`{name}`", f"{size / 1e6:.1f} M", f"{kept / 1e6:.0f} MB", f"{(16 * size + MICRO * kept) / 1e9:.1f} GB"]
    row += [f"{hours:.0f}", f"{updates:,.0f}"]
    for world, link in LINKS.items():
        reduce = 2 * 4 * size * (world - 1) / world / link  # seconds per update
        step = 3600 * hours / world / updates
        row += [f"{1000 * step:.0f} + {1000 * reduce:.0f} ms", f"{hours / world + updates * reduce / 3600:.1f} h"]
    return row


MIXER_TITLES = ("mixer of stages 3 and 4", "params", *(f"{size} px" for size in SIZES))
TRAINING_TITLES = (
    *("model", "P", "A", f"DDP, m = {MICRO}", "H", "updates"),
    *(f"{world} GPUs: {what}" for world in LINKS for what in ("update", "training")),
)
TABLES: dict[str, tuple[Sequence[str], Callable[[str], list[str]], Sequence[str]]] = {
    "mixers": (MIXER_TITLES, mixer_row, MIXERS),
    "trainings": (TRAINING_TITLES, training_row, tuple(TRAININGS)),
}


def table(name: str) -> str:
    titles, row, keys = TABLES[name]
    lines = [titles, ["---"] * len(titles), *map(row, keys)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main(pages: Sequence[str]) -> None:
    for page in map(Path, pages):
        text = page.read_text(encoding="utf-8")
        if MARK.search(text):
            write_whole(page, MARK.sub(lambda found: found[1] + table(found[2]), text))


if __name__ == "__main__":
    main(sys.argv[1:])
