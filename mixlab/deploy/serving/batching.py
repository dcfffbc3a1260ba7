"""Images of concurrent requests go through the model together, in one thread that owns it."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

LAST = None  # in the queue: nothing comes behind it


@dataclass(frozen=True)
class Done:
    """What came out for one item, and how long it took."""

    value: Any
    waited: float  # seconds from `submit` to the model
    took: float  # seconds in the model, of the whole batch
    batch: int


@dataclass
class Job:
    item: Any
    future: "Future[Done]"
    since: float


class Batcher:
    """Calls `run` with up to `most` items: those that arrive within `wait` seconds of the first one.

    It does not wait for more items than `coming` says there are: a single request is not held up. `run` returns one
    value per item. If it raises for several items, each gets a call of its own, so that one bad item harms no other.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Any]], Sequence[Any]],
        *,
        most: int,
        wait: float,
        coming: Callable[[], float] = lambda: float("inf"),
        watch: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.run, self.most, self.wait, self.coming, self.watch = run, most, wait, coming, watch
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.work, name="mixlab-model", daemon=True)

    def start(self) -> None:
        self.thread.start()

    @property
    def alive(self) -> bool:
        return self.thread.is_alive()

    def submit(self, item: Any) -> "Future[Done]":
        """Cancel the future to leave the queue."""
        job = Job(item, Future(), time.perf_counter())
        self.jobs.put(job)
        return job.future

    def close(self, timeout: float | None = None) -> None:
        """Finish what was submitted, then end the thread."""
        self.jobs.put(LAST)
        self.thread.join(timeout)

    # -- in the thread ---------------------------------------------------------------------------

    def work(self) -> None:
        more = True
        while more:
            batch, more = self.gather()
            ready = [job for job in batch if job.future.set_running_or_notify_cancel()]
            if ready:
                self.handle(ready)

    def gather(self) -> tuple[list[Job], bool]:
        """A batch, and whether there may be another one."""
        first = self.jobs.get()
        if first is LAST:
            return [], False
        batch, until = [first], time.perf_counter() + self.wait
        while len(batch) < self.most:
            left = until - time.perf_counter() if len(batch) < self.coming() else 0
            try:
                job = self.jobs.get(timeout=left) if left > 0 else self.jobs.get_nowait()
            except queue.Empty:
                break
            if job is LAST:
                return batch, False
            batch.append(job)
        return batch, True

    def handle(self, batch: list[Job]) -> None:
        started = time.perf_counter()
        try:
            values = self.run([job.item for job in batch])
            took = time.perf_counter() - started
            self.watch(len(batch))
            for job, value in zip(batch, values, strict=True):
                job.future.set_result(Done(value, started - job.since, took, len(batch)))
        except Exception as error:
            if len(batch) == 1:
                batch[0].future.set_exception(error)
            else:
                for job in batch:
                    self.handle([job])
