"""Models as folders that others can load: safetensors, config.json and a model card, here or on the Hugging Face Hub.

The same folder is read by `mixlab.from_hub`, by `mixlab.create_model(weights=FOLDER/model.safetensors)` and, after
`import mixlab.timm`, by `timm.create_model("local-dir:FOLDER", pretrained=True)`.
"""

import json
import tempfile
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from mixlab.core.errors import ConfigError, HubError
from mixlab.core.files import write_whole
from mixlab.core.version import VERSION
from mixlab.dense.files import load_dense
from mixlab.findings.findings import check_folder
from mixlab.hub.model_card import Metrics, check_metrics, model_card
from mixlab.models.backbone import Backbone
from mixlab.models.config import ModelConfig
from mixlab.models.dense_model import DenseModel, Trainable
from mixlab.models.released import SHA256, endpoint, hub_errors, offline, sha256_of, verify
from mixlab.models.weights import save_weights, unwrapped
from mixlab.models.zoo import create_model, model_config, rows

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
LOCAL, REMOTE = "local-dir:", "hf-hub:"  # as timm writes them
TOLD_ELSEWHERE = (  # fields of a config that are no arguments for timm, or come to it in `pretrained_cfg`
    *("name", "family", "paper", "recipe", "reported"),
    *("num_classes", "in_channels", "image_size", "preprocessing"),
)
Place = str | PathLike[str]


# -- in ------------------------------------------------------------------------------------------


def from_hub(
    place: Place,
    *,
    revision: str | None = None,
    cache_dir: str | PathLike[str] | None = None,
    token: str | bool | None = None,
    **overrides: Any,
) -> Trainable:
    """Load the model of a folder, or of a repository OWNER/NAME on the Hub, that `push_to_hub` wrote.

    A folder of that name comes first; "hf-hub:OWNER/NAME" and "local-dir:PATH" leave no doubt. The hash of the weights
    is checked. `overrides` change fields of a classifier's config as in `create_model`.
    """
    folder = as_folder(place)
    if folder is None:
        repository = str(place).removeprefix(REMOTE)
        about, weights = fetch_repository(repository, revision, cache_dir, token)
    elif not (folder / CONFIG).is_file():
        what = "has no config.json" if folder.is_dir() else "does not exist"
        raise HubError(f"The folder {folder} {what}. `push_to_hub` writes one; a repository is hf-hub:OWNER/NAME.")
    else:
        if revision is not None:
            raise ConfigError(f"A folder has no revisions; got revision={revision!r} for {folder}.")
        about = read_config(folder / CONFIG)
        weights = folder / about["weights"]["file"]
        if not weights.is_file():
            raise HubError(f"{weights} is missing: {folder / CONFIG} says that the weights are there.")
    verify(weights, about["weights"]["sha256"], f"the weights that {CONFIG} describes")
    if about.get("task", "classification") == "classification":
        return create_model(weights=weights, **overrides)
    if overrides:
        raise ConfigError(f"A model for {about['task']} is rebuilt as it is; got {', '.join(overrides)}.")
    return load_dense(weights)


def fetch_repository(
    repository: str, revision: str | None, cache_dir: str | PathLike[str] | None, token: str | bool | None
) -> tuple[dict[str, Any], Path]:
    """Return a repository's description of its model and its weight file, from the Hub's cache or the network."""
    advice = (
        f"Cannot load {repository!r} from {endpoint()}. Without a network, fetch {CONFIG} and {WEIGHTS} of the "
        f"repository elsewhere into a folder and give that: from_hub(FOLDER)."
    )
    with hub_errors(advice):
        from huggingface_hub import hf_hub_download

        def get(file: str) -> Path:
            path = hf_hub_download(
                repository,
                file,
                revision=revision,
                cache_dir=None if cache_dir is None else str(cache_dir),
                token=token,
                endpoint=endpoint(),
                local_files_only=offline(),
                library_name="mixlab",
                library_version=VERSION,
            )
            return Path(path)

        about = read_config(get(CONFIG))
        return about, get(about["weights"]["file"])


def read_config(path: Path) -> dict[str, Any]:
    """Return the part of a config.json that describes a Mixlab model, checked."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise HubError(f"{path} is not a readable config.json: {error}") from error
    about = entries.get("mixlab") if isinstance(entries, dict) else None
    if not isinstance(about, dict):
        raise HubError(
            f"{path} describes no Mixlab model. Weights of other code go into a named model: "
            f"create_model(NAME, weights=FILE), or weights='released' for the papers' own."
        )
    weights = about.get("weights")
    file, digest = (weights.get("file"), weights.get("sha256")) if isinstance(weights, dict) else (None, None)
    named = isinstance(file, str) and Path(file).name == file
    if not named or not isinstance(digest, str) or not SHA256.fullmatch(digest):
        raise HubError(f"{path} must name a weight file beside it and its sha256; it says {weights!r}.")
    return about


# -- out -----------------------------------------------------------------------------------------


def push_to_hub(
    model: nn.Module,
    place: Place,
    *,
    metrics: Metrics | None = None,
    license: str = "unknown",
    data: str = "",
    description: str = "",
    private: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    message: str = "Upload a Mixlab model",
    licence: str | None = None,
) -> str:
    """Write a model into a folder, or upload it to OWNER/NAME on the Hub; return the folder or the upload's address.

    A text with one slash is a repository unless its first part is a folder here. A model card that is there already
    stays as it is. `metrics` are names with numbers or texts, `data` says what the model was trained on.
    `licence` is the older spelling of `license`.
    """
    inner, results = unwrapped(model), dict(metrics or {})
    check_metrics(results)
    folder = as_folder(place)
    repository = None if folder is not None else str(place).removeprefix(REMOTE)
    texts = {"license": licence or license, "data": data, "description": description}
    card = model_card(inner, architecture(inner), repository, metrics=results, **texts)
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            raise HubError(f"{folder} is a file; a model is written into a folder.")
        write_folder(inner, check_folder(folder), card)
        return str(folder)
    return upload(inner, str(repository), card, private=private, revision=revision, token=token, message=message)


def upload(
    model: Trainable,
    repository: str,
    card: str,
    *,
    private: bool,
    revision: str | None,
    token: str | bool | None,
    message: str,
) -> str:
    """Upload a model as a commit of a repository, which is made if need be; return the commit's address."""
    advice = f"Nothing was uploaded to {repository!r}. Push to a folder first: push_to_hub(model, FOLDER)."
    if offline():
        raise HubError(f"HF_HUB_OFFLINE is set. {advice}")
    with hub_errors(advice), tempfile.TemporaryDirectory() as temporary:
        from huggingface_hub import HfApi

        api = HfApi(endpoint=endpoint(), token=token, library_name="mixlab", library_version=VERSION)
        target = api.create_repo(repository, private=private, exist_ok=True).repo_id
        write_folder(model, Path(temporary), card)
        kept = [CARD] if api.file_exists(target, CARD, revision=revision) else None
        done = api.upload_folder(
            repo_id=target, folder_path=temporary, commit_message=message, revision=revision, ignore_patterns=kept
        )
        return str(done.commit_url)


def write_folder(model: Trainable, folder: Path, card: str) -> None:
    """Write the weights, then the config with their hash, then the card unless there is one."""
    save_weights(model, folder / WEIGHTS)
    config = hub_config(model, sha256_of(folder / WEIGHTS))
    write_whole(folder / CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    if not (folder / CARD).exists():
        write_whole(folder / CARD, card)


def hub_config(model: Trainable, digest: str) -> dict[str, Any]:
    """Return the entries of config.json: timm's if timm can build the model, and Mixlab's."""
    task = model.task if isinstance(model, DenseModel) else "classification"
    ours = {"version": VERSION, "task": task, "weights": {"file": WEIGHTS, "sha256": digest}}
    name = architecture(model)
    if name is None or isinstance(model, DenseModel):
        return {"mixlab": ours}
    from mixlab.hub.timm import default_cfg

    config = model.config
    about = default_cfg(config)
    labels = {"label_names": list(model.class_names)} if model.class_names else {}
    return {
        "architecture": name,
        "num_classes": config.num_classes,
        "num_features": config.dims[-1],
        **labels,
        "model_args": timm_arguments(config),
        "pretrained_cfg": about,
        "mixlab": ours,
    }


def architecture(model: Trainable) -> str | None:
    """Return the name that timm knows a model by, or None if timm cannot build it."""
    if not isinstance(model, Backbone) or model.config.name not in rows():
        return None
    return f"mixlab_{model.config.name}"


def timm_arguments(config: ModelConfig) -> dict[str, Any]:
    """Return how a config differs from its named model, as arguments of `timm.create_model`."""
    usual, entries = model_config(config.name, in_channels=config.in_channels), config.plain()
    changed = {
        field.name: entries[field.name]
        for field in fields(config)
        if field.name not in TOLD_ELSEWHERE and getattr(config, field.name) != getattr(usual, field.name)
    }
    if config.image_size != usual.image_size:
        changed["img_size"] = list(config.image_size)
    return changed


def as_folder(place: Place) -> Path | None:
    """Return the folder that a text means, or None if it means a repository."""
    if not isinstance(place, (str, PathLike)) or not str(place):
        raise ConfigError(f"A model is in a folder or in a repository OWNER/NAME; got {place!r}.")
    text = str(place)
    if text.startswith(REMOTE):
        return None
    path = Path(text.removeprefix(LOCAL)).expanduser()
    repository = isinstance(place, str) and text.count("/") == 1 and text[0] not in "./~" and text[-1] != "/"
    here = text.startswith(LOCAL) or path.is_dir() or path.parent.is_dir()
    return None if repository and not here else path
