"""Public checkpoints of the papers: a row of `configs/checkpoints.toml` becomes a verified file on this machine.

A file is looked for in `$MIXLAB_CACHE` (default ~/.cache/mixlab), in the cache of the Hugging Face Hub, and then on the
network, unless HF_HUB_OFFLINE is set.
"""

import functools
import hashlib
import os
import re
import sys
import tomllib
import urllib.request
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from importlib import resources
from pathlib import Path
from typing import Any

from mixlab.core.choices import make
from mixlab.core.errors import ConfigError, HubError, MixlabError, near_misses

WORD = "released"
CHUNK = 1 << 20  # bytes
TIMEOUT = 30  # seconds without an answer
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Release:
    """One public weight file: in a repository of the Hugging Face Hub, or at a URL."""

    model: str
    tag: str
    page: str  # where its authors describe it
    file: str
    repository: str = ""
    url: str = ""
    layout: str  # of `configs/layouts`
    license: str
    sha256: str = ""  # the leading digits that are published, if any
    top1: float | None = None  # percent, ImageNet-1K
    data: str = "imagenet-1k"
    image_size: int = 224
    num_classes: int = 1000
    crop: float | None = None  # where it is not the model's own

    def __post_init__(self) -> None:
        if bool(self.repository) == bool(self.url):
            raise ConfigError(f"The checkpoint {self.tag!r} of {self.model!r} needs a repository or a url, not both.")

    @property
    def address(self) -> str:
        """Return the address at which a browser finds the file."""
        return self.url or f"{endpoint()}/{self.repository}/resolve/main/{self.file}"

    @property
    def local(self) -> Path:
        """Return the path at which a copy that was fetched by hand is looked for."""
        return cache_folder() / f"{self.model}.{self.tag}" / Path(self.file).name

    @property
    def overrides(self) -> dict[str, Any]:
        """Return the options that `create_model` needs besides the name."""
        crop = {} if self.crop is None else {"preprocessing": {"crop": self.crop}}
        return {"image_size": self.image_size, "num_classes": self.num_classes, **crop}


@functools.cache
def releases() -> dict[str, dict[str, Release]]:
    """Return every known checkpoint by model and tag; the first tag of a model is its default."""
    file = resources.files("mixlab") / "configs" / "checkpoints.toml"
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    return {
        model: {tag: parse(model, tag, row, data["sources"]) for tag, row in tags.items()}
        for model, tags in data["models"].items()
    }


def parse(model: str, tag: str, row: dict[str, Any], sources: dict[str, Any]) -> Release:
    entries = {key: value for key, value in row.items() if key != "source"}
    given = {"model": model, "tag": tag, **sources[row["source"]], **entries}
    return make(Release, given, f"the checkpoint {tag!r} of {model!r}")


def find_release(name: str, wanted: str = WORD) -> Release:
    """Return the checkpoint that "released" or "released:TAG" means for a model."""
    if not name:
        raise ConfigError(
            f"{wanted!r} weights need the name of a single model: create_model(NAME, weights={wanted!r})."
        )
    if name not in releases():
        raise ConfigError(
            f"No public checkpoint of {name!r} is known; there are some of {', '.join(sorted(releases()))}. "
            f"Give a file: create_model({name!r}, weights=PATH)."
        )
    tags = releases()[name]
    _, mark, tag = wanted.partition(":")
    if mark and tag not in tags:
        raise ConfigError(f"{name!r} has no checkpoint {tag!r}. {near_misses(tag, tags)}")
    return tags[tag] if mark else next(iter(tags.values()))


def is_released(weights: object) -> bool:
    """Return whether these weights name a public checkpoint instead of a file."""
    return isinstance(weights, str) and (weights == WORD or weights.startswith(f"{WORD}:"))


# -- from a row to a file ------------------------------------------------------------------------


def fetch(release: Release) -> Path:
    """Return the path of the checkpoint on this machine, downloaded if need be, its hash checked if one is known."""
    if release.local.is_file():
        path, expected = release.local, release.sha256
    elif release.repository:
        path = from_repository(release)
        blob = path.resolve().name  # the Hub's cache names large files by their hash
        expected = release.sha256 or (blob if SHA256.fullmatch(blob) else "")
    else:
        if offline():
            raise HubError(f"{what_to_do(release)} (HF_HUB_OFFLINE is set.)")
        download(release.url, release.local, release)
        path, expected = release.local, release.sha256
    verify(path, expected, f"the checkpoint {release.tag!r} of {release.model!r}")
    if not expected:
        warnings.warn(
            f"No hash is known for {path}: names and shapes of its tensors are all that is checked.", stacklevel=4
        )
    return path


def from_repository(release: Release) -> Path:
    with hub_errors(what_to_do(release)):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(release.repository, release.file, endpoint=endpoint(), local_files_only=offline()))


def download(url: str, target: Path, release: Release | None = None) -> None:
    """Download a file from a URL; it appears under its name only when it is complete."""
    advice = f" {what_to_do(release)}" if release else ""
    part = target.with_name(f"{target.name}.{uuid.uuid4().hex}.part")  # processes of one run may fetch at once
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer, part.open("wb") as out:
            declared = answer.headers.get("Content-Length")
            received = copy(answer, out, int(declared) if declared else None, target.name)
        if declared and received != int(declared):
            raise HubError(f"{url} broke off after {received} of {declared} bytes. Try again.")
        if release is not None:
            verify(part, release.sha256, f"what {url} gave")
        os.replace(part, target)
    except MixlabError:
        raise
    except (OSError, ValueError, HTTPException) as error:  # a URLError is an OSError
        raise HubError(f"Cannot fetch {url}: {first_line(error)}.{advice}") from error
    finally:
        part.unlink(missing_ok=True)


def copy(answer: Any, out: Any, total: int | None, title: str) -> int:
    """Copy the bytes of an answer into a file, with a progress bar, and return their number."""
    received = 0
    with progress(title, total) as advance:
        while chunk := answer.read(CHUNK):
            out.write(chunk)
            received += len(chunk)
            advance(len(chunk))
    return received


@contextmanager
def progress(title: str, total: int | None) -> Iterator[Any]:
    """Show a progress bar on a terminal, and nothing in pipes; gives the function that moves it."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.update(task, advance=count)


def verify(path: Path, expected: str, what: str) -> None:
    """Raise unless the sha256 of a file starts with the digits that are known of it."""
    if not expected:
        return
    digest = sha256_of(path)
    if not digest.startswith(expected.lower()):
        raise HubError(
            f"{path} is not {what}: its sha256 starts with {digest[: len(expected)]}, expected {expected}. "
            f"It is damaged or was replaced; delete it and fetch it again."
        )


def sha256_of(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


# -- the surroundings ----------------------------------------------------------------------------


def cache_folder() -> Path:
    return Path(os.environ.get("MIXLAB_CACHE") or Path.home() / ".cache" / "mixlab")


def endpoint() -> str:
    """Return the address of the Hub, or of the mirror that the environment names."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def what_to_do(release: Release) -> str:
    return (
        f"The checkpoint {release.tag!r} of {release.model!r} is not on this machine. On one with a network, fetch "
        f"{release.address} and put it at {release.local}, or give the file itself: "
        f"create_model({release.model!r}, weights=FILE)."
    )


@contextmanager
def hub_errors(advice: str) -> Iterator[None]:
    """Turn whatever the client of the Hub runs into into one error that says what to do."""
    from huggingface_hub import errors

    try:
        yield
    except MixlabError:
        raise
    except errors.LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set." if offline() else first_line(error)
        raise HubError(f"{advice} ({why})") from error
    except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise HubError(f"The Hub refuses: {first_line(error)} {advice}") from error
    except Exception as error:  # which library the client speaks through is its own affair
        raise HubError(f"{first_line(error)} {advice}") from error


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
