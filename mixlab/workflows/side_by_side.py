"""Several runs at a time, each in a process of its own with its share of the threads."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import torch

from mixlab.core.errors import MixlabError

Work = Callable[[], bool]  # whether it was stopped before its end
DONE, STOPPED = "done", "stopped"


def run_side_by_side(works: Mapping[str, Work], *, jobs: int) -> tuple[dict[str, str], bool]:
    """What failed and why, by name, and whether anything was stopped. Nothing that fails ends the others.

    After Ctrl-C nothing more is begun; what runs hears it too, saves itself and is waited for.
    """
    waiting, alive = deque(works.items()), dict[str, tuple[SpawnProcess, Connection]]()
    threads = max(1, torch.get_num_threads() // min(jobs, max(1, len(works))))
    failed: dict[str, str] = {}
    stopped = False
    while alive or (waiting and not stopped):
        try:
            while waiting and len(alive) < jobs and not stopped:
                name, work = waiting.popleft()
                alive[name] = start(work, threads)
            wait([process.sentinel for process, _ in alive.values()])
        except KeyboardInterrupt:
            stopped = True
        for name in [name for name, (process, _) in alive.items() if not process.is_alive()]:
            said = outcome(*alive.pop(name))
            stopped = stopped or said == STOPPED
            if said not in (DONE, STOPPED):
                failed[name] = said
    return failed, stopped


def start(work: Work, threads: int) -> tuple[SpawnProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run_alone, args=(work, threads, theirs))
    process.start()
    theirs.close()
    return process, ours


def outcome(process: SpawnProcess, said: Connection) -> str:
    """`DONE`, `STOPPED`, or why it failed."""
    process.join()
    try:
        return str(said.recv()) if said.poll() else f"its process ended with code {process.exitcode}"
    except EOFError:
        return f"its process ended with code {process.exitcode}"


def run_alone(work: Work, threads: int, tell: Connection) -> None:
    """The life of a child."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        said = STOPPED if work() else DONE
    except KeyboardInterrupt:
        said = STOPPED
    except MixlabError as error:
        said = str(error)
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        said = f"{type(error).__name__}: {error}"
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        tell.send(said)


def end_with_parent() -> None:
    """A parent that was killed leaves nobody behind who writes into its folders."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
