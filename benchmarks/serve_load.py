"""Mixed good and bad requests at once against a server of its own process: right answers, 4xx, memory and latency.

    python benchmarks/serve_load.py run/final.safetensors
    python benchmarks/serve_load.py run/final.safetensors --requests 200 --rounds 5

The server is `mixlab serve` in a second process. Every good request is checked against `mixlab predict`, every bad one
against the status it deserves. A warm-up round comes before the first memory reading. The exit code is 1 if anything
is not as it should be.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

BOUNDARY = "between"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
TOLERANCE = 1e-4
GROWTH = 0.10  # of the memory after the warm-up round, that the last round may add
PICTURES = 24


@dataclass(frozen=True)
class Case:
    """A request, the status it deserves, and if that is 200 the best class and its score for every image."""

    name: str
    body: bytes
    kind: str
    status: int
    expected: tuple[tuple[str, float], ...] = ()
    slow: bool = False  # stops in the middle of the body


@dataclass(frozen=True)
class Outcome:
    case: Case
    status: int
    seconds: float
    right: bool


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights")
    parser.add_argument("--requests", type=int, default=200, help="at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=30.0, help="of the server; the slow clients take this long")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        good = good_cases(arguments.weights, Path(folder))
    cases = [*good, *bad_cases()]
    with server(arguments.weights, arguments.timeout) as place:
        print("warm-up")
        burst(place, chosen(cases, arguments.requests, 0))
        memory = [resident(place)]
        outcomes: list[Outcome] = []
        for number in range(1, arguments.rounds + 1):
            outcomes += burst(place, chosen(cases, arguments.requests, number))
            memory.append(resident(place))
            print(f"round {number}: {memory[-1] / 2**20:.0f} MB")
    return report(outcomes, memory)


# -- requests ------------------------------------------------------------------------------------


def good_cases(weights: str, folder: Path) -> list[Case]:
    """Photographs of several sizes and formats, alone and in threes, with what `mixlab predict` says."""
    from mixlab.evals.quality.accuracy import predict

    random_number = np.random.default_rng(0)
    paths = []
    for number in range(PICTURES):
        width, height = (int(side) for side in random_number.integers(40, 900, 2))
        coarse = random_number.integers(0, 256, (max(1, height // 16), max(1, width // 16), 3), dtype=np.uint8)
        kind = ("png", "jpeg", "webp")[number % 3]
        paths.append(folder / f"{number}.{kind}")
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(paths[-1])
    told = [(one.classes[0], one.probabilities[0]) for one in predict(weights, paths, top=1)]
    data = [path.read_bytes() for path in paths]
    singles = [Case("good", form(one), FORM, 200, (said,)) for one, said in zip(data, told, strict=True)]
    bare = [Case("good", one, "image/png", 200, (said,)) for one, said in zip(data, told, strict=True)]
    threes = [
        Case("good", form(*data[start : start + 3]), FORM, 200, tuple(told[start : start + 3]))
        for start in range(0, PICTURES, 3)
    ]
    return singles + bare + threes


def bad_cases() -> list[Case]:
    photo = encoded(Image.effect_noise((300, 200), 60), "JPEG")
    tiny = encoded(Image.new("L", (4, 4)), "PNG")
    cut = form(photo[: len(photo) // 2])
    return [
        Case("not an image", form(b"not an image" * 100), FORM, 422),
        Case("100-megapixel PNG", form(encoded(Image.new("L", (10_000, 10_000)), "PNG")), FORM, 413),
        Case("truncated JPEG", cut, FORM, 422),
        Case("10,000 tiny files", form(*[tiny] * 10_000), FORM, 413),
        Case("wrong content type", b"{}", "application/json", 415),
        Case("too many bytes", form(bytes(21 * 2**20)), FORM, 413),
        Case("path trick and no image", form(b"x", name="../../../../etc/passwd"), FORM, 422),
        Case("malformed form", b"--wrong\r\n", FORM, 400),
        Case("one bad of three", form(photo, photo[:500], photo), FORM, 422),
        Case("slow client", form(photo), FORM, 408, slow=True),
    ]


def encoded(image: Image.Image, kind: str) -> bytes:
    kept = BytesIO()
    image.save(kept, kind)
    return kept.getvalue()


def form(*files: bytes, name: str = "image") -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'.encode()
    return b"".join(head + data + b"\r\n" for data in files) + f"--{BOUNDARY}--\r\n".encode()


def chosen(cases: list[Case], count: int, seed: int) -> list[Case]:
    """Half good and half bad, in a random order; every bad case is there."""
    draw = random.Random(seed)
    good, bad = ([case for case in cases if (case.status == 200) is kind] for kind in (True, False))
    bad = [bad[number % len(bad)] for number in range(count // 2)]
    mixed = bad + draw.choices(good, k=count - len(bad))
    draw.shuffle(mixed)
    return mixed


def burst(place: tuple[str, int], cases: list[Case]) -> list[Outcome]:
    """All at once: every client connects, and then all of them send."""
    together = threading.Barrier(len(cases))
    with ThreadPoolExecutor(len(cases)) as threads:
        return list(threads.map(lambda case: send(place, case, together), cases))


def send(place: tuple[str, int], case: Case, together: threading.Barrier) -> Outcome:
    connection = http.client.HTTPConnection(*place, timeout=180)
    together.wait()
    started = time.perf_counter()
    try:
        connection.connect()
        connection.putrequest("POST", "/predict?top=1")
        connection.putheader("Content-Type", case.kind)
        connection.putheader("Content-Length", str(len(case.body)))
        connection.endheaders()
        with contextlib.suppress(ConnectionError):  # the server may refuse before it has read everything
            connection.send(case.body[: len(case.body) // 2] if case.slow else case.body)
        answer = connection.getresponse()
        told = json.loads(answer.read())
        right = answer.status == case.status and (matches(case, told) if answer.status == 200 else bool(told["detail"]))
        return Outcome(case, answer.status, time.perf_counter() - started, right)
    except (OSError, http.client.HTTPException, ValueError) as error:
        print(f"{case.name}: {type(error).__name__}: {error}", file=sys.stderr)
        return Outcome(case, 0, time.perf_counter() - started, False)
    finally:
        connection.close()


def matches(case: Case, told: dict[str, list[dict[str, list[dict[str, float | str]]]]]) -> bool:
    found = [image["classes"][0] for image in told["results"]]
    if len(found) != len(case.expected):
        return False
    pairs = zip(found, case.expected, strict=True)
    return all(one["name"] == name and abs(float(one["score"]) - score) < TOLERANCE for one, (name, score) in pairs)


# -- the server ----------------------------------------------------------------------------------


@contextlib.contextmanager
def server(weights: str, timeout: float) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-m", "mixlab", "serve", weights, "--port", "0", "--timeout", str(timeout)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        if "http" not in line:
            raise SystemExit(line + process.stderr.read())
        parts = urlsplit(next(word for word in line.split() if word.startswith("http")))
        try:
            yield str(parts.hostname), int(parts.port or 0)
        finally:
            process.terminate()
            log = process.stderr.read()
            print(f"the server ended with {process.wait()}" + (f"; its log:\n{log}" if log else "; its log is empty"))


def resident(place: tuple[str, int]) -> int:
    """Bytes of the server's memory, as it says itself."""
    connection = http.client.HTTPConnection(*place, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return int(next(line.split()[1] for line in lines if line.startswith("process_resident_memory_bytes ")))


def report(outcomes: list[Outcome], memory: list[int]) -> int:
    rows = Counter((one.case.name, one.case.status, one.status, one.right) for one in outcomes)
    for (name, wanted, status, right), count in sorted(rows.items()):
        print(f"{'ok   ' if right else 'WRONG'} {count:5d} x {name}: {status}" + ("" if right else f", not {wanted}"))
    good = sorted(one.seconds for one in outcomes if one.case.status == 200)
    shares = [good[min(len(good) - 1, int(share * len(good)))] for share in (0.5, 0.99)]
    print(f"good requests: p50 {1000 * shares[0]:.0f} ms, p99 {1000 * shares[1]:.0f} ms of {len(good)}")
    growth = memory[-1] / memory[0] - 1
    print(
        f"memory: {memory[0] / 2**20:.0f} MB after the warm-up, {memory[-1] / 2**20:.0f} MB at the end ({growth:+.1%})"
    )
    return int(not all(one.right for one in outcomes) or growth > GROWTH)


if __name__ == "__main__":
    sys.exit(main())
