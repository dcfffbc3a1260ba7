"""The thread that runs the model: what it puts together, and what one bad item may not spoil."""

import threading
from collections.abc import Sequence

import pytest

from mixlab.deploy.serving.batching import Batcher


class Doubler:
    """Doubles numbers, remembers its batches, refuses 13, and stands still until it is let go."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go = threading.Event()

    def __call__(self, items: Sequence[int]) -> list[int]:
        assert self.go.wait(10)
        self.batches.append(list(items))
        if 13 in items:
            raise ValueError("13")
        return [2 * item for item in items]


def test_what_waits_is_taken_together_up_to_the_limit() -> None:
    double = Doubler()
    batcher = Batcher(double, most=4, wait=0.2)
    batcher.start()
    futures = [batcher.submit(number) for number in range(10)]
    double.go.set()
    assert [future.result(5).value for future in futures] == [2 * number for number in range(10)]
    assert [len(batch) for batch in double.batches] == [4, 4, 2]
    assert futures[-1].result().batch == 2
    batcher.close()


def test_a_lone_item_does_not_wait_for_others() -> None:
    double = Doubler()
    double.go.set()
    batcher = Batcher(double, most=4, wait=60, coming=lambda: 1)
    batcher.start()
    assert batcher.submit(1).result(5).waited < 5
    batcher.close()


def test_a_bad_item_harms_no_other_of_its_batch() -> None:
    double = Doubler()
    batcher = Batcher(double, most=3, wait=0.2)
    batcher.start()
    futures = [batcher.submit(number) for number in (1, 13, 2)]
    double.go.set()
    assert [futures[0].result(5).value, futures[2].result(5).value] == [2, 4]
    with pytest.raises(ValueError, match="13"):
        futures[1].result(5)
    assert batcher.submit(5).result(5).value == 10
    batcher.close()


def test_a_canceled_item_is_not_computed() -> None:
    double = Doubler()
    batcher = Batcher(double, most=1, wait=0)
    batcher.start()
    first, second, third = (batcher.submit(number) for number in (1, 2, 3))
    assert second.cancel()
    double.go.set()
    assert third.result(5).value == 6
    assert double.batches == [[1], [3]]
    assert first.result(5).value == 2
    batcher.close()


def test_closing_finishes_what_was_submitted() -> None:
    double = Doubler()
    batcher = Batcher(double, most=2, wait=60)
    batcher.start()
    futures = [batcher.submit(number) for number in range(5)]
    double.go.set()
    batcher.close(timeout=10)
    assert not batcher.alive
    assert [future.result(0).value for future in futures] == [0, 2, 4, 6, 8]
