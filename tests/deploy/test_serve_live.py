"""The server on a real socket: slow and endless clients, signals, ports, and its warning."""

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

import mixlab
from mixlab import cli
from mixlab.cli import serving as verb
from mixlab.core.errors import ConfigError, MixlabError
from tests.deploy.uploads import FORM, form, png

pytest.importorskip("fastapi")

from mixlab.deploy.serve import bound, protocol, serve, serving

GOOD = form(png(0))


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    mixlab.save_weights(mixlab.create_model("caformer_pico", num_classes=3, image_size=32), path)
    return path


@pytest.fixture(scope="module")
def place(weights: Path) -> Iterator[tuple[str, int]]:
    with serving(weights, timeout=1.0, max_bytes=2**20) as address:
        yield split(address)


def split(address: str) -> tuple[str, int]:
    parts = urlsplit(address)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def head(length: int | str, kind: str = FORM) -> bytes:
    size = "Transfer-Encoding: chunked" if length == "chunked" else f"Content-Length: {length}"
    return f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n{size}\r\n\r\n".encode()


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def everything(connection: socket.socket) -> bytes:
    connection.settimeout(10)
    found = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(65536):
            found += piece
    return found


def post(place: tuple[str, int], body: bytes = GOOD) -> int:
    connection = http.client.HTTPConnection(*place, timeout=20)
    connection.request("POST", "/predict", body, {"Content-Type": FORM})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def test_a_body_that_never_ends_is_cut_off_without_a_declared_length(place: tuple[str, int]) -> None:
    with socket.create_connection(place) as connection:
        connection.sendall(head("chunked", "image/png"))
        piece = b"10000\r\n" + bytes(65536) + b"\r\n"
        with contextlib.suppress(ConnectionError):
            for _ in range(18):  # 1.1 MB, and no end
                connection.sendall(piece)
        assert status_of(everything(connection)) == 413
    assert post(place) == 200


def test_a_declared_length_beyond_the_limit_is_refused_at_once(place: tuple[str, int]) -> None:
    with socket.create_connection(place) as connection:
        connection.sendall(head(10**12) + b"--between")
        answer = everything(connection)
    assert status_of(answer) == 413
    assert "1048576 bytes" in json.loads(answer.partition(b"\r\n\r\n")[2])["detail"]


def test_a_slow_body_gets_408_and_others_are_served_meanwhile(place: tuple[str, int]) -> None:
    with socket.create_connection(place) as connection:
        connection.sendall(head(len(GOOD)) + GOOD[:50])
        assert post(place) == 200
        assert status_of(everything(connection)) == 408
    assert post(place) == 200


def test_dripping_headers_are_cut_off(place: tuple[str, int]) -> None:
    started = time.monotonic()
    with socket.create_connection(place) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < started + 3:
                connection.sendall(b"X-Drip: 1\r\n")
                time.sleep(0.1)
        assert time.monotonic() - started < 5
        found = everything(connection)
    assert not found or status_of(found) == 408
    assert post(place) == 200


def test_an_answer_that_nobody_reads_is_thrown_away() -> None:
    import asyncio

    import uvicorn

    size, ended = 2**26, asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        await send({"type": "http.response.body", "body": bytes(size)})

    class Watched(protocol(0.3)):  # type: ignore[misc]
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            ended.set()

    async def visit() -> None:
        door = bound("127.0.0.1", 0)
        server = uvicorn.Server(uvicorn.Config(app, http=Watched, lifespan="off", log_level="error"))
        running = asyncio.create_task(server._serve([door]))
        while not server.started:
            await asyncio.sleep(0.01)
        with socket.create_connection(door.getsockname()) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            await asyncio.wait_for(ended.wait(), 10)
        server.should_exit = True
        await running

    asyncio.run(visit())


def test_a_client_that_hangs_up_leaves_no_trace(place: tuple[str, int]) -> None:
    for _ in range(5):
        with socket.create_connection(place) as connection:
            connection.sendall(head(len(GOOD)) + GOOD[:100])
    assert post(place) == 200


def test_a_connection_is_kept_for_the_next_request(place: tuple[str, int]) -> None:
    connection = http.client.HTTPConnection(*place, timeout=20)
    for _ in range(3):
        connection.request("POST", "/predict", GOOD, {"Content-Type": FORM})
        answer = connection.getresponse()
        assert answer.status == 200
        assert len(json.loads(answer.read())["results"]) == 1
        assert not answer.will_close
    connection.close()


def test_a_port_that_is_taken_is_named_before_the_weights_are_read(place: tuple[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"port {place[1]}"), serving("nowhere.safetensors", port=place[1]):
        pass


@pytest.mark.parametrize("host", ["no.such.host.invalid", "1.2.3.4"])
def test_an_address_that_is_not_here_is_an_error(host: str) -> None:
    with pytest.raises(ConfigError, match="Cannot serve at"), serving("nowhere.safetensors", host=host):
        pass


def test_a_public_address_without_a_token_is_warned_of(weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(weights, host="0.0.0.0", token="secret"):
        assert capsys.readouterr().err == ""
    with serving(weights, host="0.0.0.0"):
        assert "anyone who reaches 0.0.0.0" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_a_loopback_address_of_another_name_answers_to_it(weights: Path) -> None:
    with serving(weights, host="127.0.0.2") as address:
        assert post(split(address)) == 200


def test_a_model_that_fails_on_its_first_image_is_an_error() -> None:
    model = mixlab.create_model("caformer_pico", num_classes=3, image_size=32)
    torch.nn.init.constant_(model.get_parameter("head.classifier.bias"), float("nan"))
    with pytest.raises(MixlabError, match="did not start"):
        serve(model, port=0)


@contextlib.contextmanager
def process(weights: Path, *more: str) -> Iterator[tuple["subprocess.Popen[str]", tuple[str, int]]]:
    command = [sys.executable, "-m", "mixlab", "serve", str(weights), "--port", "0", *more]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell in the background ignores it
    ) as own:
        try:
            assert own.stderr is not None
            line = own.stderr.readline()
            assert "Serving" in line, line + own.stderr.read()
            yield own, split(next(word for word in line.split() if word.startswith("http")))
        finally:
            own.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_lets_running_requests_finish_and_then_ends_quietly(
    weights: Path, number: signal.Signals, code: int
) -> None:
    with process(weights) as (server, place), socket.create_connection(place) as connection:
        assert post(place) == 200
        connection.sendall(head(len(GOOD)) + GOOD[:60])
        time.sleep(0.3)
        server.send_signal(number)
        time.sleep(0.5)
        assert server.poll() is None
        with pytest.raises(ConnectionRefusedError):  # no new ones
            socket.create_connection(place)
        connection.sendall(GOOD[60:])
        assert status_of(everything(connection)) == 200
        assert server.wait(20) == code
        assert server.stderr is not None
        assert server.stderr.read() == ""


def test_missing_weights_are_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "no.safetensors"]) == 2
    assert capsys.readouterr().err == "mixlab: The weight file no.safetensors does not exist.\n"


def test_the_verb_hands_its_defaults_on_as_they_are_in_python() -> None:
    from mixlab.deploy.serve import BATCH, WAIT_MS
    from mixlab.deploy.serving.limits import Limits

    given = verb.serve_parser().parse_args(["w.safetensors"])
    limits = Limits(**{field.name: given[field.name] for field in dataclasses.fields(Limits)})
    assert limits == Limits()
    assert (given.batch, given.wait_ms, given.host) == (BATCH, WAIT_MS, "127.0.0.1")
