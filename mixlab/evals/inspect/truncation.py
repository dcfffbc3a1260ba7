"""What is lost when the kernels of a stage are cut (HyenaPixel, Figure 7)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from mixlab.core.errors import ConfigError, DataError, require
from mixlab.core.processes import processes
from mixlab.data.loader import Loader
from mixlab.data.open import open_data
from mixlab.data.subset import spread
from mixlab.evals.inspect.kernels import each_mixer, learned_kernels, stage_of
from mixlab.evals.quality.accuracy import check_classes
from mixlab.evals.subjects import Subject, backbone_of
from mixlab.findings.findings import Finding, Picture, finding
from mixlab.findings.panels import line_chart
from mixlab.models.backbone import Backbone
from mixlab.models.implicit_filter import ImplicitFilter
from mixlab.models.layers import DepthwiseConv
from mixlab.ops.depthwise import depthwise

SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
Watch = Callable[[int, int], None]  # forward passes done, and in all


@contextmanager
def truncated(source: Subject | nn.Module, share: float, *, stages: Sequence[int] | None = None) -> Iterator[None]:
    """Only the centered part of each kernel counts: `share` of its size in every axis. By default in all stages.

    1 changes nothing; 0 takes the whole kernel away and leaves the factor per channel, or the bias, that stands beside
    it. The model is as it was afterwards, and what eval mode keeps of its kernels as well.
    """
    model = backbone_of(source, "kernels")
    require(0 <= share <= 1, f"a share of the kernel between 0 and 1; got {share}.")
    with ExitStack() as undo:
        for part in kernel_parts(model, stages):
            # a hook makes the filter's kernels be made anew for each call: none that is kept is used, and none is kept
            handle = part.register_forward_hook(
                CutFilter(share) if isinstance(part, ImplicitFilter) else CutConv(share)
            )
            undo.callback(handle.remove)
        yield


def kernel_parts(model: Backbone, stages: Sequence[int] | None) -> list[nn.Module]:
    """The modules that give the kernels of these stages."""
    with_kernels = stages_with_kernels(model)
    for stage in stages or ():
        if stage not in with_kernels:
            raise ConfigError(
                f"Stage {stage} of {model.config.name!r} has no kernels to cut; stages with kernels: {with_kernels}."
            )
    wanted = with_kernels if stages is None else stages
    return [part for _, mixer, stage in each_mixer(model) if stage in wanted for part in mixer.kernel_sources()]


def stages_with_kernels(model: Backbone) -> list[int]:
    return sorted({stage for _, mixer, stage in each_mixer(model) if mixer.kernel_sources()})


def inside(taps: tuple[int, ...], share: float, *, causal: bool) -> Tensor:
    """True for the taps (taps...) of which more than half is within the centered share of a kernel."""
    size = torch.tensor(taps).double()
    if causal:
        return torch.arange(taps[0]) < share * size[0]
    axes = [(torch.arange(count) - count // 2).abs() < share * count / 2 for count in taps]
    return axes[0] if len(taps) == 1 else axes[0][:, None] & axes[1]


class CutFilter:
    """Behind an implicit filter: (taps..., C) with zeros outside."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, part: nn.Module, inputs: tuple[Any, ...], kernel: Tensor) -> Tensor:
        assert isinstance(part, ImplicitFilter)
        kept = inside(tuple(kernel.shape[:-1]), self.share, causal=part.causal).to(kernel.device)
        return kernel if bool(kept.all()) else kernel * kept[..., None].to(kernel.dtype)


class CutConv:
    """Behind a depthwise convolution: its output with a kernel that has zeros outside."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, part: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        assert isinstance(part, DepthwiseConv)
        height, width = part.kernel_size
        kept = inside((height, width), self.share, causal=False).to(part.weight.device)
        if bool(kept.all()):
            return output
        return depthwise(inputs[0], part.weight * kept.to(part.weight.dtype), part.bias, (height // 2, width // 2))


# -- the instrument ------------------------------------------------------------------------------


def truncation_curves(
    source: Subject,
    data: str | PathLike[str],
    *,
    shares: Sequence[float] = SHARES,
    stages: Sequence[int] | None = None,
    split: str = "val",
    images: int | None = None,
    batch: int = 64,
    workers: int = 2,
    device: str = "auto",
    watch: Watch | None = None,
) -> tuple[Finding, dict[str, Any]]:
    """Top-1 on a split with the kernels of one stage at a time cut to each share.

    `images`: only so many of them, spread over the split.
    """
    model = backbone_of(source, "kernels")
    wanted = stages_with_kernels(model) if stages is None else list(stages)
    kernel_parts(model, wanted)
    require(bool(shares) and all(0 <= share <= 1 for share in shares), f"shares between 0 and 1; got {list(shares)}.")
    sizes = kernel_sizes(source)
    parts = open_data(data, split)  # type: ignore[arg-type]
    check_classes(model, parts.class_names, str(data))
    if images is not None:
        require(images >= 1, f"1 image or more; got {images}.")
        if not hasattr(parts, "read"):
            raise DataError(f"{data} is a stream of shards, of which no part can be taken: leave out --images.")
        parts = spread(parts, images)  # type: ignore[arg-type]
    settings = [(stage, share) for stage in wanted for share in sorted(set(shares))]
    with processes(device) as own:
        source.to(own.device)
        loader = Loader(parts, source.transform(), batch_size=batch, train=False, seed=0, workers=workers)
        correct, full, count = count_correct(model, loader, settings, own.device, watch)
    require(count > 0, f"images in the {split} split of {data}; got none.")
    rows = [
        [f"stage {stage}", share, *sizes[stage](share), 100 * right / count, 100 * (right - full) / count]
        for (stage, share), right in correct.items()
    ]
    return report(source, rows, {"data": str(data), "split": split, "images": count, "top1": 100 * full / count})


def kernel_sizes(source: Subject) -> dict[int, Callable[[float], tuple[str, float]]]:
    """For each stage and share: the taps that are left, and their size relative to the feature map."""
    found = {stage_of(name): one for name, one in learned_kernels(source).items()}

    def size_at(stage: int) -> Callable[[float], tuple[str, float]]:
        one = found[stage]

        def size(share: float) -> tuple[str, float]:
            kept = inside(one.taps, share, causal=one.causal)
            axes = [kept.any(1).sum().item(), kept.any(0).sum().item()] if kept.ndim == 2 else [kept.sum().item()]
            relative = sum(count / side for count, side in zip(axes, one.sides, strict=True)) / len(axes)
            return "x".join(str(int(count)) for count in axes), relative

        return size

    return {stage: size_at(stage) for stage in found}


@torch.inference_mode()
def count_correct(
    model: Backbone,
    loader: Loader,
    settings: Sequence[tuple[int, float]],
    device: torch.device,
    watch: Watch | None,
) -> tuple[dict[tuple[int, float], int], int, int]:
    """Right answers for each stage and share, without any cut, and images. Every image is read once."""
    correct, full, count, done = dict.fromkeys(settings, 0), 0, 0, 0
    total = len(loader) * (len(settings) + 1)
    for one in loader.epoch(0):
        pixels, labels = one.images.to(device), one.labels.to(device)
        full += right(model(pixels), labels)
        count, done = count + len(labels), done + 1
        for stage, share in settings:
            with truncated(model, share, stages=[stage]):
                correct[stage, share] += right(model(pixels), labels)
            done += 1
            if watch is not None:
                watch(done, total)
    return correct, full, count


def right(scores: Tensor, labels: Tensor) -> int:
    """How many have the highest score; equal scores and scores that are no numbers count against it."""
    others = (~(scores < scores.gather(1, labels[:, None]))).sum(1) - 1
    return int((others < 1).sum())


def report(source: Subject, rows: list[list[Any]], settings: dict[str, Any]) -> tuple[Finding, dict[str, Any]]:
    lines: dict[str, Any] = {}
    for stage, share, _, _, top1, _ in rows:
        places, values = lines.setdefault(stage, ([], []))
        places.append(share)
        values.append(top1)
    chart = line_chart(lines, x="share of the kernel's size that is kept", y="top-1, %")
    chart.axes[0].axhline(settings["top1"], color="gray", linewidth=1, linestyle=":")
    made = finding(
        "truncate",
        f"Truncated kernels of {source.name}",
        ("stage", "share kept", "taps kept", "of the map", "top-1 %", "change"),
        rows,
        settings={"model": source.name, "image_size": list(source.image_size), "trained": source.trained, **settings},
        pictures=(Picture(name="truncate", caption="Top-1 with the kernels of one stage cut; dotted: as they are"),),
    )
    return made, {"truncate": chart}
