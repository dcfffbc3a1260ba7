"""Tar shards as webdataset writes them: for every sample an image and a `.cls` file of the same name."""

import hashlib
import random
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mixlab.core.errors import DataError
from mixlab.data.arrow import split_files
from mixlab.data.folder import EXTENSIONS
from mixlab.data.kinds import LISTED
from mixlab.data.seeding import seed_of

SUFFIXES = (".tar", ".tgz", ".tar.gz")
CLASS_FILE = "classes.txt"  # beside the shards: a name per line, in the order of the numbers in `.cls`
BUFFER = 1000  # samples among which the order is mixed


@dataclass(frozen=True)
class Sample:
    """An image that is still packed. `identity` is the same in every epoch and on every machine."""

    name: str
    raw: bytes
    label: int
    identity: int


@dataclass(frozen=True)
class Reader:
    """Which of the processes that share a stream reads: number `slot` of `slots`."""

    slot: int = 0
    slots: int = 1


ALONE = Reader()


class ShardStream:
    """One split of sharded data. It is read from front to back; there is no access by index.

    `length` and `class_names` may be given to spare one look through all shards; `length` may then be approximate and
    decides how many batches a training epoch has. An evaluation reads every sample once in any case.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        *,
        class_names: Sequence[str] = (),
        length: int | None = None,
        buffer: int = BUFFER,
    ) -> None:
        if not shards:
            raise DataError("No shards were given. Expected one .tar file or more.")
        self.shards = [Path(shard) for shard in shards]
        self.buffer = buffer
        labels = [] if class_names and length is not None else [label for shard in self.shards for label in scan(shard)]
        self.length = len(labels) if length is None else length
        self.class_names = tuple(class_names) or number_names(labels)
        self.numbers = {name: number for number, name in enumerate(self.class_names)}

    def __len__(self) -> int:
        return self.length

    def samples(self, *, train: bool, seed: int, epoch: int, reader: Reader = ALONE) -> Iterator[Sample]:
        """What one reader gets: for training in the order of (seed, epoch), else in that of the shards.

        Whole shards go to a reader where there are enough of them, else every `slots`-th sample.
        """
        shards = list(self.shards)
        if train:
            random.Random(seed_of(seed, epoch)).shuffle(shards)
        whole = len(shards) >= reader.slots
        own = shards[reader.slot :: reader.slots] if whole else shards
        stream = (sample for shard in own for sample in self.read(shard))
        if not whole:
            stream = (sample for number, sample in enumerate(stream) if number % reader.slots == reader.slot)
        return mixed(stream, self.buffer, seed_of(seed, epoch, reader.slot)) if train else stream

    def read(self, shard: Path) -> Iterator[Sample]:
        for key, image, label in members(shard):
            name = f"{shard}/{key}"
            identity = hashlib.blake2b(f"{shard.name}/{key}".encode(), digest_size=8).digest()
            yield Sample(name, image, self.number(label, name), int.from_bytes(identity, "little") >> 1)

    def number(self, label: str, name: str) -> int:
        number = int(label) if label.isdigit() else self.numbers.get(label, -1)
        if not 0 <= number < len(self.class_names):
            raise DataError(
                f"{name} has the class {label!r}; expected a number under {len(self.class_names)} or one of "
                f"{', '.join(self.class_names[:LISTED])} ... Check {CLASS_FILE} beside the shards."
            )
        return number


def is_shards(path: Path) -> bool:
    return bool(split_files(path, SUFFIXES)) if path.is_dir() else path.name.lower().endswith(SUFFIXES)


def shard_splits(path: Path) -> list[str]:
    return list(split_files(path, SUFFIXES))


def open_shards(path: Path, split: str) -> ShardStream:
    folder = path if path.is_dir() else path.parent
    names = folder / CLASS_FILE
    lines = names.read_text(encoding="utf-8").splitlines() if names.is_file() else []
    return ShardStream(split_files(path, SUFFIXES)[split], class_names=[line.strip() for line in lines if line.strip()])


def members(shard: Path) -> Iterator[tuple[str, bytes, str]]:
    """Key, image and class of every sample: files of one key follow each other in a shard."""
    key, image, label = "", b"", ""
    with opened(shard) as archive:
        for entry in walk(archive, shard):
            stem, _, extension = split_name(entry.name)
            if stem != key:
                yield from complete(shard, key, image, label)
                key, image, label = stem, b"", ""
            if f".{extension}" in EXTENSIONS:
                image = content(archive, entry, shard)
            elif extension == "cls":
                label = content(archive, entry, shard).decode("utf-8", "replace").strip()
    yield from complete(shard, key, image, label)


def complete(shard: Path, key: str, image: bytes, label: str) -> Iterator[tuple[str, bytes, str]]:
    if image and label:
        yield key, image, label
    elif image:
        raise DataError(f"{shard}/{key} has an image but no class. Expected {key}.cls with the number of its class.")


def scan(shard: Path) -> Iterator[str]:
    """The classes in a shard, without reading its images."""
    with opened(shard) as archive:
        for entry in walk(archive, shard):
            if split_name(entry.name)[2] == "cls":
                yield content(archive, entry, shard).decode("utf-8", "replace").strip()


def opened(shard: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(shard)
    except (OSError, tarfile.TarError) as error:
        raise DataError(f"The shard {shard} cannot be opened: {error}. Copy it again, or take it out.") from error


def walk(archive: tarfile.TarFile, shard: Path) -> Iterator[tarfile.TarInfo]:
    try:
        for entry in archive:
            if entry.isfile() and not entry.name.rpartition("/")[2].startswith("."):
                yield entry
    except (OSError, EOFError, tarfile.TarError) as error:
        raise DataError(f"The shard {shard} breaks off: {error}. Copy it again, or take it out.") from error


def content(archive: tarfile.TarFile, entry: tarfile.TarInfo, shard: Path) -> bytes:
    file: IO[bytes] | None = archive.extractfile(entry)
    raw = file.read() if file else b""
    if len(raw) != entry.size:
        raise DataError(f"The shard {shard} breaks off in {entry.name}. Copy it again, or take it out.")
    return raw


def split_name(name: str) -> tuple[str, str, str]:
    """A sample's key is its name up to the first dot behind the last slash."""
    folder, slash, file = name.rpartition("/")
    stem, dot, extension = file.partition(".")
    return folder + slash + stem, dot, extension.lower()


def number_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Names for classes that only have numbers, or the sorted names themselves."""
    if not labels:
        raise DataError("The shards hold no .cls files. Expected KEY.jpg and KEY.cls for every sample.")
    if all(label.isdigit() for label in labels):
        return tuple(str(number) for number in range(max(map(int, labels)) + 1))
    return tuple(sorted(set(labels)))


def mixed(stream: Iterator[Sample], size: int, seed: int) -> Iterator[Sample]:
    """A shuffle buffer: each place that is taken is filled with the next sample."""
    order = random.Random(seed)
    held: list[Sample] = []
    for sample in stream:
        if len(held) < size:
            held.append(sample)
            continue
        place = order.randrange(size)
        yield held[place]
        held[place] = sample
    order.shuffle(held)
    yield from held
