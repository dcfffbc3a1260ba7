"""The papers behind the families, to be cited."""

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources

from mixlab.core.choices import make

OTHER = {"ensembles": "hyenapixel"}  # families without a paper of their own


@dataclass(frozen=True, kw_only=True)
class Paper:
    key: str
    title: str
    authors: tuple[str, ...]
    venue: str
    year: int
    arxiv: str

    @property
    def bibtex(self) -> str:
        names = " and ".join(self.authors)
        fields = {"title": self.title, "author": names, "journal": self.venue, "year": self.year, "eprint": self.arxiv}
        lines = "".join(f"  {name} = {{{value}}},\n" for name, value in fields.items())
        return f"@article{{{self.key},\n{lines}  archivePrefix = {{arXiv}}\n}}"


@functools.cache
def papers() -> dict[str, Paper]:
    file = resources.files("mixlab") / "configs" / "papers.toml"
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    return {family: make(Paper, row, f"the paper of {family!r}") for family, row in data.items()}


def paper_of(family: str) -> Paper | None:
    """Return the paper of a family of models, or None for a family that is not Mixlab's."""
    return papers().get(OTHER.get(family, family))
