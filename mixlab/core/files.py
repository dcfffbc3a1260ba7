"""Files that appear under their name only when they are complete."""

import os
import tempfile
from os import PathLike
from pathlib import Path

from mixlab.core.errors import MixlabError


def current_umask() -> int:
    """Return which permissions new files of this process lack."""
    umask = os.umask(0)
    os.umask(umask)
    return umask


def write_whole(path: str | PathLike[str], content: str | bytes) -> None:
    """Write a file whole: text as UTF-8, or bytes."""
    target, temporary = Path(path), None
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with open(handle, "wb") as opened:
            opened.write(content.encode() if isinstance(content, str) else content)
        os.chmod(temporary, 0o666 & ~current_umask())
        os.replace(temporary, target)
    except OSError as error:
        raise MixlabError(f"Cannot write {target}: {error.strerror or error}.") from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
