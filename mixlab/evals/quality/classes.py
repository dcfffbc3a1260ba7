"""Models for the classes of a dataset."""

from collections.abc import Sequence
from dataclasses import replace

from mixlab.core.errors import DataError
from mixlab.evals.quality.accuracy import check_classes
from mixlab.evals.subjects import Source, Subject, open_subject
from mixlab.models.model import Model


def open_for_classes(source: Source, class_names: Sequence[str], data: str, *, seed: int = 0) -> Subject:
    """A model that tells these classes apart; fresh weights get a head for them, others must have been trained on them.

    A model of timm does not know the names of its classes: their number must agree, and their order is trusted.
    """
    subject = open_subject(source, seed=seed)
    if not subject.trained and subject.num_classes != len(class_names):
        subject = open_subject(source, num_classes=len(class_names), seed=seed)
    if isinstance(subject.model, Model):
        check_classes(subject.model, class_names, data)
    elif subject.num_classes != len(class_names):
        raise DataError(
            f"{subject.name!r} tells {subject.num_classes} classes apart; {data} has {len(class_names)}. "
            f"Give weights that were trained on these classes."
        )
    return subject if subject.class_names else replace(subject, class_names=tuple(class_names))
