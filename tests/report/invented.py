"""Comparisons with invented numbers."""

from typing import Any

from mixlab.report import Comparison, ModelResult, Point


def model(name: str, *top1: float, **more: Any) -> ModelResult:
    curves = tuple(
        tuple(Point(epoch, 2.0 / epoch, 2.5 / epoch, accuracy * epoch / 4) for epoch in range(1, 5))
        for accuracy in top1
    )
    costs = {"params": 1_000_000, "macs": 20_000_000, "latency_ms": 5.0, "peak_mb": 30.0}
    return ModelResult(
        name=name,
        top1=top1,
        **{"curves": curves, **costs, "images_per_second": 400.0, "train_seconds": 75.0, **more},
    )


def comparison(*models: ModelResult, **more: Any) -> Comparison:
    seeds = tuple(range(max(len(model.top1) for model in models)))
    about: dict[str, Any] = {"title": "Invented", "data": "digits", "recipe": "small", "image_size": (32, 32)}
    return Comparison(**{**about, "epochs": 4, "seeds": seeds, "models": models, "test_images": 400, **more})


def several(count: int, seeds: int, **more: Any) -> Comparison:
    """Models that get worse and cheaper one by one."""
    models = [
        model(
            f"model_{index}",
            *(98.0 - index + 0.2 * seed for seed in range(seeds)),
            latency_ms=20.0 - index,
            macs=(30 - index) * 1_000_000,
            peak_mb=50.0 - index,
        )
        for index in range(count)
    ]
    return comparison(*models, **more)
