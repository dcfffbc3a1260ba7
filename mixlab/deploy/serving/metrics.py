"""Counters of the server in the text format of Prometheus."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
IMAGES = (1, 2, 4, 8, 16, 32, 64)


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * len(bounds)
        self.total, self.count = 0.0, 0

    def observe(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1
        for place, bound in enumerate(self.bounds):
            self.counts[place] += value <= bound  # each bucket counts all that is below its bound

    def lines(self, name: str) -> list[str]:
        buckets = [f'{name}_bucket{{le="{bound:g}"}} {n}' for bound, n in zip(self.bounds, self.counts, strict=True)]
        rest = f'{name}_bucket{{le="+Inf"}} {self.count}', f"{name}_sum {self.total:g}", f"{name}_count {self.count}"
        return [*buckets, *rest]


class Metrics:
    """May be told from any thread."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        self.waiting = waiting
        self.lock = threading.Lock()
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.latency, self.batches = Histogram(SECONDS), Histogram(IMAGES)

    def request(self, path: str, method: str, status: int, seconds: float) -> None:
        with self.lock:
            self.requests[path, method, status] += 1
            if path == "/predict":
                self.latency.observe(seconds)

    def batch(self, images: int) -> None:
        with self.lock:
            self.batches.observe(images)

    def text(self) -> str:
        with self.lock:
            rows = sorted(self.requests.items())
            lines = [
                *described("mixlab_requests_total", "counter", "Requests by path, method and status."),
                *(
                    f'mixlab_requests_total{{path="{path}",method="{method}",status="{status}"}} {count}'
                    for (path, method, status), count in rows
                ),
                *described("mixlab_predict_seconds", "histogram", "Time of requests to /predict, refused ones too."),
                *self.latency.lines("mixlab_predict_seconds"),
                *described("mixlab_batch_images", "histogram", "Images that went through the model together."),
                *self.batches.lines("mixlab_batch_images"),
                *described("mixlab_queue_images", "gauge", "Images that wait for the model or are in it."),
                f"mixlab_queue_images {self.waiting()}",
            ]
        memory = resident_bytes()
        if memory is not None:
            lines += described("process_resident_memory_bytes", "gauge", "Memory of the process.")
            lines.append(f"process_resident_memory_bytes {memory}")
        return "\n".join(lines) + "\n"


def described(name: str, kind: str, words: str) -> tuple[str, str]:
    return f"# HELP {name} {words}", f"# TYPE {name} {kind}"


def resident_bytes() -> int | None:
    """Of this process; None where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError, IndexError):
        return None
