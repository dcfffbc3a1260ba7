"""How far the kernels of several models reach, block by block in one picture (HyenaPixel, Figure 6)."""

from collections.abc import Mapping, Sequence
from typing import Any

from mixlab.core.errors import require
from mixlab.evals.inspect.kernels import (
    COLUMNS,
    WINDOW,
    BlockKernels,
    attention_coverage,
    draw_means,
    each_mixer,
    learned_kernels,
    row_of,
)
from mixlab.evals.subjects import Subject, backbone_of, short_names
from mixlab.findings.findings import Finding, Picture, finding
from mixlab.findings.panels import line_chart
from mixlab.models.backbone import Backbone

Places = tuple[Sequence[float], Sequence[float]]  # numbers of blocks, and the coverage of each


def compare_coverage(sources: Sequence[Subject]) -> tuple[Finding, dict[str, Any]]:
    """A row for every block with kernels, and a line per model: what its token mixers cover, attention included."""
    names = short_names(sources)
    require(len(set(names)) == len(names) > 1, f"two or more different models; got {', '.join(names)}.")
    found = {name: learned_kernels(source) for name, source in zip(names, sources, strict=True)}
    models = {name: backbone_of(source, "kernels") for name, source in zip(names, sources, strict=True)}
    lines = {name: coverage_by_depth(models[name], found[name]) for name in names}
    depth = max(len(list(each_mixer(model))) for model in models.values())
    figures = {
        "coverage": line_chart(
            lines,
            x="block, counted from the image",
            y="diameter / feature map",
            ticks=[str(number) for number in range(1, depth + 1)],
        )
    }
    captions = {"coverage": "Diameter of the kernels relative to the feature map; attention counts as 2"}
    for number, name in enumerate(names):
        figures[f"kernels-{number}"] = draw_means(found[name])
        captions[f"kernels-{number}"] = f"{name}: mean kernel of every block, divided by its largest weight"
    settings = {
        "models": [source.name for source in sources],
        "image_sizes": [list(source.image_size) for source in sources],
        "window": WINDOW,
        "trained": [source.trained for source in sources],
    }
    made = finding(
        "kernels",
        f"Kernels of {', '.join(names)}",
        ("model", *COLUMNS),
        [[name, *row_of(block)] for name in names for block in found[name].values()],
        settings=settings,
        data={"coverage": {name: [list(place) for place in zip(*line, strict=True)] for name, line in lines.items()}},
        pictures=tuple(Picture(name=name, caption=caption) for name, caption in captions.items()),
    )
    return made, figures


def coverage_by_depth(model: Backbone, found: Mapping[str, BlockKernels]) -> Places:
    """The coverage of the blocks that have kernels or attend to everything; others leave a gap."""
    attention = attention_coverage(model)
    known: tuple[list[float], list[float]] = ([], [])
    for number, (name, _, _) in enumerate(each_mixer(model)):
        if name in found or name in attention:
            known[0].append(number)
            known[1].append(found[name].coverage if name in found else attention[name])
    return known
