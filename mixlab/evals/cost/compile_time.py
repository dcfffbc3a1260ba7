"""How long a model takes to compile in a fresh process: with an empty cache, and again with the cache that this left.

The first thing that is compiled in a process pays for starting the compiler, and with an empty cache for building what
all compiled code shares. A trivial function is therefore compiled first and told apart.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mixlab.core.errors import MixlabError
from mixlab.evals.cost.execution import Execution
from mixlab.evals.cost.speed import child_answer
from mixlab.evals.subjects import open_subject


@dataclass(frozen=True)
class CompileTime:
    """Seconds of the first call, which compiles and runs; `trivial` is what a trivial function took before it."""

    cold: float
    warm: float
    trivial_cold: float
    trivial_warm: float
    graphs: int

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def compile_time(
    model: str,
    image_size: tuple[int, int],
    *,
    batch: int,
    execution: Execution,
    changes: Mapping[str, Any] | None = None,
    limit_seconds: float = 900.0,
) -> CompileTime:
    """Of any text that `open_subject` takes, with its `changes`. Two processes in a row share a cache, first empty."""
    how = {**asdict(execution), "compiled": True}
    job = {"model": model, "image_size": image_size, "batch": batch, "execution": how, "changes": dict(changes or {})}
    text = json.dumps({**job, "threads": torch.get_num_threads()})
    with tempfile.TemporaryDirectory(prefix="mixlab-compile-") as cache:
        places = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
        cold, warm = (
            child_answer("mixlab.evals.cost.compile_time", text, f"compile time of {model!r}", limit_seconds, places)
            for _ in range(2)
        )
    return CompileTime(cold["model"], warm["model"], cold["trivial"], warm["trivial"], cold["graphs"])


def measure(job: Mapping[str, Any]) -> dict[str, float]:
    """In the child."""
    torch.set_num_threads(job["threads"])
    execution = Execution(**job["execution"])
    execution.check(torch.device("cpu"))
    subject = open_subject(job["model"], image_size=tuple(job["image_size"]), changes=job["changes"])
    start = time.perf_counter()
    torch.compile(lambda x: x * 2 + 1)(torch.randn(8))
    trivial = time.perf_counter() - start
    model = execution.prepare(subject.model)
    images = execution.images(model, job["batch"], subject.image_size, subject.in_channels)
    start = time.perf_counter()
    execution.runner(model, images)()
    whole = time.perf_counter() - start
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - 1
    return {"trivial": trivial, "model": whole, "graphs": graphs}


def main() -> int:
    parser = argparse.ArgumentParser(description="The process that `compile_time` starts.")
    parser.add_argument("--child", required=True, help="the job as JSON")
    try:
        print(json.dumps(measure(json.loads(parser.parse_args().child))))
    except MixlabError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
