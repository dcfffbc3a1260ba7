"""The README.md that goes with a model on the Hugging Face Hub."""

import json
from collections.abc import Mapping

from mixlab.core.errors import ConfigError
from mixlab.models.dense_model import DenseModel, Trainable
from mixlab.models.papers import Paper, paper_of

Metrics = Mapping[str, float | str]
PIPELINES = {"segmentation": "image-segmentation", "detection": "object-detection"}


def check_metrics(metrics: Metrics) -> None:
    right = all(isinstance(name, str) and isinstance(value, (int, float, str)) for name, value in metrics.items())
    if not right:
        raise ConfigError(f"Metrics are names with numbers or texts; got {dict(metrics)!r}.")


def model_card(
    model: Trainable,
    architecture: str | None,
    repository: str | None,
    *,
    metrics: Metrics,
    license: str,
    data: str,
    description: str,
) -> str:
    """Write a card: front matter, what the model is, how to load it, its metrics, and whom to cite."""
    config = model.backbone.config if isinstance(model, DenseModel) else model.config
    task = PIPELINES.get(model.task, model.task) if isinstance(model, DenseModel) else "image-classification"
    tags = ["mixlab", task] + (["timm"] if architecture else [])
    parts = [
        front_matter({"library_name": "mixlab", "license": license, "pipeline_tag": task, "tags": tags}),
        f"# {config.name}\n\n{description}".rstrip() + "\n",
        table("What it is", facts(model, data)),
        usage(repository, architecture),
    ]
    if metrics:
        parts.append(table("Metrics", {name: shown(value) for name, value in metrics.items()}))
    paper = paper_of(config.family)
    if paper is not None:
        parts.append(citation(paper))
    return "\n".join(parts)


def front_matter(entries: Mapping[str, object]) -> str:
    # JSON is YAML, so that no text can break out of its entry
    return "---\n" + "".join(f"{key}: {json.dumps(value)}\n" for key, value in entries.items()) + "---\n"


def facts(model: Trainable, data: str) -> dict[str, str]:
    config = model.backbone.config if isinstance(model, DenseModel) else model.config
    entries = {
        "architecture": config.name,
        "token mixers": ", ".join(dict.fromkeys(choice.name for choice in config.mixers)),
        "parameters": f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.2f} M",
        "image size": " x ".join(str(side) for side in config.image_size),
        "classes": str(model.config.num_classes),
    }
    if model.class_names:
        entries["class names"] = ", ".join(model.class_names[:20]) + (", ..." if len(model.class_names) > 20 else "")
    return entries | ({"trained on": data} if data else {})


def usage(repository: str | None, architecture: str | None) -> str:
    """Write the lines that load the model; a folder is not named, because it may be moved or published."""
    here = "path/to/this/folder"
    lines = ["import mixlab", "", f"model = mixlab.from_hub({json.dumps(repository or here)})"]
    if architecture:
        source = f"hf-hub:{repository}" if repository else f"local-dir:{here}"
        lines += [
            "",
            "import mixlab.timm",
            "import timm",
            "",
            f"model = timm.create_model({source!r}, pretrained=True)",
        ]
    return "## How to load it\n\n```python\n" + "\n".join(lines) + "\n```\n"


def citation(paper: Paper) -> str:
    link = f"[arXiv:{paper.arxiv}](https://arxiv.org/abs/{paper.arxiv})"
    return f"## Citation\n\n{paper.title}, {link}\n\n```bibtex\n{paper.bibtex}\n```\n"


def table(title: str, entries: Mapping[str, str]) -> str:
    rows = "".join(f"| {cell(name)} | {cell(value)} |\n" for name, value in entries.items())
    return f"## {title}\n\n| | |\n|---|---|\n{rows}"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
