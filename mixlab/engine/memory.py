"""Where in one piece of memory each room of a plan lies: rooms that are not needed at the same time share a place."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

LINE = 16  # numbers that rooms begin at multiples of: a line of the cache


class Life(NamedTuple):
    """The first and the last step that a room is used by."""

    first: int
    last: int


class MemoryLayout(NamedTuple):
    """Where rooms begin, and how many numbers there are in all."""

    starts: dict[int, int]
    size: int


def assign(sizes: Sequence[int], lives: Mapping[int, Life]) -> MemoryLayout:
    """Places for all rooms that have a life: each at the first gap that is large enough, the largest rooms first."""
    placed: list[tuple[int, int, Life]] = []  # start, end, life
    starts: dict[int, int] = {}
    for room in sorted(lives, key=lambda room: (-sizes[room], lives[room].first)):
        life, size = lives[room], -(-sizes[room] // LINE) * LINE
        start = 0
        for begin, end, _ in sorted(entry for entry in placed if meet(entry[2], life)):
            if begin - start >= size:
                break
            start = max(start, end)
        placed.append((start, start + size, life))
        starts[room] = start
    return MemoryLayout(starts, max((end for _, end, _ in placed), default=0))


def meet(one: Life, other: Life) -> bool:
    """Whether both rooms are needed at some step."""
    return one.first <= other.last and other.first <= one.last
