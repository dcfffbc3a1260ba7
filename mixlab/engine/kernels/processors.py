"""How many processors' worth of time the control groups of Linux leave this process: containers are limited so."""

import math
import pathlib
from collections.abc import Iterator

NO_LIMIT = 1024  # threads, more than a pool has
GROUPS = pathlib.Path("/proc/self/cgroup")
MOUNT = pathlib.Path("/sys/fs/cgroup")


def allowed_processors(groups: pathlib.Path = GROUPS, mount: pathlib.Path = MOUNT) -> int:
    """The tightest quota of processor time on the way from this process's groups to the root, rounded up to whole
    processors; `NO_LIMIT` where there is none.
    """
    quotas = [quota for folder in group_folders(groups, mount) if (quota := read_quota(folder)) is not None]
    return max(1, math.ceil(min(quotas))) if quotas else NO_LIMIT


def group_folders(groups: pathlib.Path, mount: pathlib.Path) -> Iterator[pathlib.Path]:
    """The folders of the groups that this process is in, and of those above them."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = mount / controllers if controllers else mount
        folder = root / path.lstrip("/")
        yield from (folder, *(above for above in folder.parents if above.is_relative_to(root)))


def read_quota(folder: pathlib.Path) -> float | None:
    """Processors' worth of time that one group may use, of either version of control groups."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
