"""Images with a class for every pixel: ADE20K, Cityscapes, and folders of images and PNG masks."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from mixlab.core.errors import DataError, UnreadableImage
from mixlab.data.dense import IGNORE, MaskData, Masked
from mixlab.data.folder import images_below, split_folders
from mixlab.data.images import decode, reason, upright
from mixlab.data.kinds import LISTED, Array

EXPECTED = "Expected ROOT/images/train|val|test/X.jpg, ROOT/masks/train|val|test/X.png and ROOT/classes.txt."
INDEXED = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L")  # modes whose pixels are numbers, not colors
NO_LABEL = -1  # in a table of labels: a value that must not occur
ADE20K_CLASSES = 150
ADE20K_FOLDERS = {"train": "training", "val": "validation"}
CITYSCAPES = {  # label in the files: the class; the other labels are not evaluated
    **{7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole", 19: "traffic light"},
    **{20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky", 24: "person", 25: "rider", 26: "car"},
    **{27: "truck", 28: "bus", 31: "train", 32: "motorcycle", 33: "bicycle"},
}
CITYSCAPES_LABELS = 34


class UnreadableMask(UnreadableImage, DataError):
    """A mask that is broken, of another size than its image, or with values that are no class."""


class MaskFiles(MaskData):
    """An image file and a mask file per sample. `table` says the class of each value of a mask (see `table_of`)."""

    def __init__(self, pairs: Sequence[tuple[Path, Path]], class_names: Sequence[str], table: Array) -> None:
        self.class_names = tuple(class_names)
        self.images = [str(image) for image, _ in pairs]  # a million Path objects are slow to send to a worker
        self.masks = [str(mask) for _, mask in pairs]
        self.table = table

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> Masked:
        image = decode(Path(self.images[index]))
        mask = relabeled(read_values(Path(self.masks[index])), self.table, self.masks[index])
        if mask.shape != (image.height, image.width):
            raise UnreadableMask(
                f"The mask {self.masks[index]} has {mask.shape[1]} x {mask.shape[0]} px, its image "
                f"{self.images[index]} has {image.width} x {image.height}. Both need the same size, upright."
            )
        return Masked(image, mask)

    def name(self, index: int) -> str:
        return self.images[index]


# -- masks ---------------------------------------------------------------------------------------


def read_values(path: Path) -> Array:
    """The numbers in a mask file (H, W): palette entries or gray values, as they are."""
    try:
        with Image.open(path) as file:
            file.load()
            mask = upright(file)
            mode, values = mask.mode, np.asarray(mask)
    except Exception as error:  # on broken files Pillow's decoders raise nearly anything
        raise UnreadableMask(f"The mask {path} is not a readable image: {reason(error)}.") from error
    if mode not in INDEXED:
        raise UnreadableMask(
            f"The mask {path} is a color image (mode {mode}). Expected one number per pixel, its class: a PNG with "
            f"a palette or in gray."
        )
    return values


def relabeled(values: Array, table: Array, name: str) -> Array:
    """Classes instead of labels, (H, W) uint8. A value that is no label is an error."""
    inside = (values >= 0) & (values < len(table))
    if not inside.all():
        raise wrong_value(values[~inside].max(), table, name)
    classes = table[values.astype(np.uint8)]
    if (classes == NO_LABEL).any():
        raise wrong_value(values[classes == NO_LABEL].max(), table, name)
    return classes.astype(np.uint8)


def wrong_value(value: int, table: Array, name: str) -> UnreadableMask:
    last = np.flatnonzero(table[:IGNORE] != NO_LABEL).max()
    ignored = f", or {IGNORE} where nothing is to be learned" if table[IGNORE] == IGNORE else ""
    return UnreadableMask(
        f"The mask {name} has the value {value}; expected 0 to {last}{ignored}. Correct the mask, or check that it "
        f"belongs to these classes."
    )


def table_of(classes: Mapping[int, int]) -> Array:
    """Label -> class as a table over all values of a byte; what is not named must not occur, 255 is ignored."""
    table = np.full(256, NO_LABEL, np.int16)
    table[IGNORE] = IGNORE
    for label, number in classes.items():
        table[label] = number
    return table


def mask_problems(data: MaskData) -> Iterator[str]:
    """What is wrong with a split, reading every image and mask once."""
    broken: list[str] = []
    empty: list[str] = []
    seen: Counter[int] = Counter()
    for index in range(len(data)):
        try:
            mask = data.read(index).mask
        except (UnreadableImage, DataError) as error:
            broken.append(str(error))
            continue
        classes = [number for number in np.flatnonzero(np.bincount(mask.ravel())).tolist() if number != IGNORE]
        seen.update(classes)
        if not classes:
            empty.append(data.name(index))
    if broken:
        yield f"{len(broken)} images cannot be used, training skips them: {some(broken, ' ')}"
    if empty:
        yield (
            f"{len(empty)} masks are {IGNORE} everywhere: {some(empty)}. Nothing is learned from them and nothing is "
            f"measured on them."
        )
    missing = [name for number, name in enumerate(data.class_names) if not seen[number]]
    if missing:
        yield f"{len(missing)} classes have no pixel in any mask: {some(missing)}. Add images that show them."


def some(names: Sequence[str], between: str = ", ") -> str:
    return between.join(names[:LISTED]) + (" ..." if len(names) > LISTED else "")


# -- datasets ------------------------------------------------------------------------------------


def is_masks(root: Path) -> bool:
    """Whether a folder holds images and masks in one of the three layouts."""
    return bool(mask_splits(root))


def mask_splits(root: Path) -> list[str]:
    """The splits of a folder that have both images and masks."""
    if is_ade20k(root):
        return [split for split, name in ADE20K_FOLDERS.items() if (root / "images" / name).is_dir()]
    if is_cityscapes(root):
        held = split_folders(root / "leftImg8bit").keys() & split_folders(root / "gtFine").keys()
    else:
        held = split_folders(root / "images").keys() & split_folders(root / "masks").keys()
    return [split for split in ("train", "val", "test") if split in held]


def open_mask_data(root: Path, split: str) -> MaskFiles:
    """A split of a folder in whichever of the three layouts it is."""
    opener = open_ade20k if is_ade20k(root) else open_cityscapes if is_cityscapes(root) else open_masks
    return opener(root, split)


def is_ade20k(root: Path) -> bool:
    return (root / "annotations" / "training").is_dir() or (root / "annotations" / "validation").is_dir()


def is_cityscapes(root: Path) -> bool:
    return (root / "leftImg8bit").is_dir() and (root / "gtFine").is_dir()


def open_ade20k(root: Path, split: str) -> MaskFiles:
    """The 150 classes of ADEChallengeData2016. Label 0 in its files is "other": ignored."""
    if split not in ADE20K_FOLDERS:
        raise DataError(f"ADE20K has masks for train and val; got the split {split!r}.")
    folder = ADE20K_FOLDERS[split]
    pairs = paired(root / "images" / folder, root / "annotations" / folder, lambda image: image.with_suffix(".png"))
    table = table_of({0: IGNORE, **{number + 1: number for number in range(ADE20K_CLASSES)}})
    table[IGNORE] = NO_LABEL  # the release has no other value
    return MaskFiles(pairs, ade20k_names(root / "objectInfo150.txt"), table)


def ade20k_names(path: Path) -> list[str]:
    """From the file of the release: a table whose first column is the label and whose last is the name."""
    if not path.is_file():
        return [f"class {label}" for label in range(1, ADE20K_CLASSES + 1)]
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    names = {int(row[0]): row[-1].strip() for row in rows if row[0].strip().isdigit()}
    if sorted(names) != list(range(1, ADE20K_CLASSES + 1)):
        raise DataError(
            f"{path} names {len(names)} classes; expected a table with rows for the labels 1 to {ADE20K_CLASSES}. "
            f"Take the file of the release, or remove it."
        )
    return [names[label] for label in sorted(names)]


def open_cityscapes(root: Path, split: str) -> MaskFiles:
    """The 19 classes that Cityscapes evaluates, from gtFine's labelIds."""

    def mask_of(image: Path) -> Path:
        stem = image.name.removesuffix("_leftImg8bit.png")
        return image.with_name(f"{stem}_gtFine_labelIds.png")

    pairs = paired(root / "leftImg8bit" / split, root / "gtFine" / split, mask_of)
    labels = dict.fromkeys(range(CITYSCAPES_LABELS), IGNORE) | {label: at for at, label in enumerate(CITYSCAPES)}
    return MaskFiles(pairs, list(CITYSCAPES.values()), table_of(labels))


def open_masks(root: Path, split: str) -> MaskFiles:
    """Images and PNG masks of the same names; the values of masks are classes in the order of classes.txt."""
    images, masks = (split_folders(root / kind) for kind in ("images", "masks"))
    if split not in images or split not in masks:
        raise DataError(f"{root} has no images and masks for {split}. {EXPECTED}")
    pairs = paired(images[split], masks[split], lambda image: image.with_suffix(".png"))
    names = read_class_names(root / "classes.txt")
    return MaskFiles(pairs, names, table_of({number: number for number in range(len(names))}))


def read_class_names(path: Path) -> list[str]:
    """One name per line, the class of value 0 first."""
    try:
        lines = path.read_text(encoding="utf-8-sig").strip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: write a name per line there, the class of value 0 first.") from error
    names = [line.strip() for line in lines]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice or not all(names) or not 1 < len(names) <= IGNORE:
        raise DataError(
            f"{path} must name 2 to {IGNORE} different classes, one per line; got {len(names)} lines"
            f"{f', {twice[0]!r} twice' if twice else ''}."
        )
    return names


def paired(images: Path, masks: Path, mask_of: Callable[[Path], Path]) -> list[tuple[Path, Path]]:
    """Every image with its mask, at the same place below `masks` under the name that `mask_of` gives it."""
    found = images_below(images)
    if not found:
        raise DataError(f"No images in {images}. {EXPECTED}")
    held = set(images_below(masks))
    pairs = [(image, masks / mask_of(image.relative_to(images))) for image in found]
    missing = [str(image) for image, mask in pairs if mask not in held]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(found)} images in {images} have no mask: {some(missing)}. The mask of the first "
            f"would be {next(mask for _, mask in pairs if mask not in held)}. Add the masks, or remove these images."
        )
    taken = Counter(mask for _, mask in pairs)
    shared = [str(mask) for mask, count in taken.items() if count > 1]
    if shared:
        raise DataError(f"Several images share one mask: {some(shared)}. Give each image a name of its own.")
    return pairs
