"""What requests may ask for and what the server answers: the types behind its OpenAPI description."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Box = Annotated[
    list[float],
    Field(min_length=4, max_length=4, description="left, top, right, bottom in pixels of the upright image"),
]
Task = Literal["classification", "segmentation", "detection"]


class Problem(BaseModel):
    """Every answer that is an error."""

    detail: str = Field(description="what is wrong and what to do")
    image: int | None = Field(default=None, description="which image it is about, counted from 1")


class Asked(BaseModel):
    """Query parameters; unknown ones are an error."""

    model_config = ConfigDict(extra="forbid")


# -- classification ------------------------------------------------------------------------------


class AskedClasses(Asked):
    top: int = Field(default=5, ge=1, description="classes per image, the most likely first")
    cam: bool = Field(default=False, description="also the class-activation map of the most likely class")


class ClassScore(BaseModel):
    name: str
    score: float = Field(ge=0, le=1, description="probability")


class ClassActivation(BaseModel):
    """Where the image speaks for a class. The map covers only the part of the image that the model looks at."""

    name: str = Field(description="the class")
    box: Box
    png: str = Field(description="data URI of a PNG with a palette: the indices 0 to 255 are the map from 0 to 1")


class Seen(BaseModel):
    width: int = Field(description="of the upright image, px")
    height: int


class SeenClasses(Seen):
    classes: list[ClassScore]
    cam: ClassActivation | None = None


# -- segmentation --------------------------------------------------------------------------------


class AskedMask(Asked):
    mask: bool = Field(default=False, description="also the class of every pixel, as a picture")


class ClassShare(BaseModel):
    name: str
    index: int = Field(description="of the class, and in the mask")
    share: float = Field(ge=0, le=1, description="of the image's pixels")
    color: str = Field(description="in the mask, #rrggbb")


class SeenMask(Seen):
    classes: list[ClassShare] = Field(description="those that are there, the largest first")
    mask: str | None = Field(
        default=None, description="data URI of a PNG with a palette: the indices are the classes, 255 is none"
    )


# -- detection -----------------------------------------------------------------------------------


class AskedObjects(Asked):
    threshold: float = Field(default=0.5, ge=0, le=1, description="the least score of an object")
    masks: bool = Field(default=False, description="also the objects' masks, if the model gives any")


class FoundObject(BaseModel):
    name: str = Field(description="the class")
    index: int = Field(description="of the class")
    score: float = Field(ge=0, le=1)
    box: Box
    color: str = Field(description="of the class, #rrggbb")
    mask: str | None = Field(
        default=None, description="data URI of a PNG of the image's size with a palette: 1 is the object, 0 is not"
    )


class SeenObjects(Seen):
    objects: list[FoundObject] = Field(description="the highest score first")


# -- the rest ------------------------------------------------------------------------------------


class Milliseconds(BaseModel):
    """Milliseconds on the server."""

    reading: float = Field(description="until the body had arrived")
    waiting: float = Field(description="decoding, and for other requests; the longest of the images")
    model: float = Field(description="in the model; the longest of the images")
    total: float


class ClassificationAnswer(BaseModel):
    task: Literal["classification"] = "classification"
    model: str
    results: list[SeenClasses] = Field(description="one per image, in the order they were sent")
    milliseconds: Milliseconds


class SegmentationAnswer(BaseModel):
    task: Literal["segmentation"] = "segmentation"
    model: str
    results: list[SeenMask] = Field(description="one per image, in the order they were sent")
    milliseconds: Milliseconds


class DetectionAnswer(BaseModel):
    task: Literal["detection"] = "detection"
    model: str
    results: list[SeenObjects] = Field(description="one per image, in the order they were sent")
    milliseconds: Milliseconds


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class About(BaseModel):
    """What is served, and what a request may cost."""

    task: Task
    model: str
    classes: int
    image_size: list[int] = Field(min_length=2, max_length=2, description="sides that the model works at, px")
    max_bytes: int
    max_pixels: int
    max_images: int
    timeout: float
