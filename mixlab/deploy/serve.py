"""A model behind HTTP: a page for people, JSON for programs. Needs the extra `serve`."""

import contextlib
import importlib.util
import ipaddress
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mixlab.core.errors import ConfigError, MixlabError
from mixlab.core.processes import choose_device
from mixlab.dense.files import load_dense, task_of
from mixlab.models.dense_model import DenseModel
from mixlab.models.model import Model
from mixlab.models.zoo import create_model

if TYPE_CHECKING:
    from fastapi import FastAPI

Served = str | PathLike[str] | Model | DenseModel

LIBRARIES = ("fastapi", "uvicorn", "python_multipart", "captum")
BATCH, WAIT_MS = 16, 4.0
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
NOT_STARTED = "The server did not start; the log says why."
CONNECTIONS = 1000  # open at once; more are turned away
GRACE_SECONDS = 5  # beyond the time limit of requests, for answers on their way


def create_app(
    model: Served,
    *,
    token: str | None = None,
    hosts: frozenset[str] | None = LOCAL_NAMES,
    batch: int = BATCH,
    wait_ms: float = WAIT_MS,
    device: str = "auto",
    **limits: Any,
) -> "FastAPI":
    """The ASGI application, for servers and tests of your own. `limits` are fields of `Limits`.

    Unless there is a token, only requests that call the server by one of `hosts` are answered (None: by any name): a
    web page elsewhere could otherwise read from it through the visitor's browser.
    """
    need_extra()
    from mixlab.deploy.serving.app import build_app
    from mixlab.deploy.serving.limits import Limits
    from mixlab.deploy.serving.service import Service

    check_token(token)
    allowed = Limits(**limits)
    ready = (model if isinstance(model, Model | DenseModel) else load(model)).to(choose_device(device, 0))
    name = ready.config.name if isinstance(ready, Model) else ready.backbone.config.name
    service = Service(ready, name, allowed, batch=batch, wait_ms=wait_ms)
    return build_app(service, token=token, hosts=hosts if token is None else None)


def serve(
    model: Served,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    watch: Callable[[str], None] | None = None,
    **options: Any,
) -> None:
    """Serve until SIGTERM or Ctrl-C (KeyboardInterrupt), finishing the requests that are under way.

    Port 0 takes a free one; `watch` gets the address once requests are answered. `options` are those of `create_app`.
    """
    server, door = prepared(model, host, port, watch or (lambda address: None), options)

    def stop(*_: object) -> None:
        server.should_exit = True

    # uvicorn raises the signal that ended it once more: SIGTERM is a normal end
    before = signal.signal(signal.SIGTERM, stop)
    try:
        server.run(sockets=[door])
    except SystemExit:  # how uvicorn ends if the model fails on the first image
        raise MixlabError(NOT_STARTED) from None
    finally:
        signal.signal(signal.SIGTERM, before)
        door.close()


@contextlib.contextmanager
def serving(model: Served, *, host: str = "127.0.0.1", port: int = 0, **options: Any) -> Iterator[str]:
    """Serve from a thread for as long as the context lasts; gives the address."""
    ready: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    server, door = prepared(model, host, port, ready.put, options)

    def run() -> None:
        try:
            server.run(sockets=[door])
        finally:
            ready.put(None)

    thread = threading.Thread(target=run, name="mixlab-serve", daemon=True)
    thread.start()
    try:
        address = ready.get()
        if address is None:
            raise MixlabError(NOT_STARTED)
        yield address
    finally:
        server.should_exit = True
        thread.join()
        door.close()


def prepared(
    model: Served, host: str, port: int, watch: Callable[[str], None], options: dict[str, Any]
) -> tuple[Any, socket.socket]:
    """A server that is not running yet, and the socket it will listen at."""
    need_extra()
    import uvicorn

    token: str | None = options.get("token")
    check_token(token)
    door = bound(host, port)
    try:
        hosts = LOCAL_NAMES | {in_url(host).lower(), in_url(address_of(door))} if is_loopback(door) else None
        if hosts is None and token is None:
            print(f"mixlab: warning: anyone who reaches {host} can use this server. Set a token.", file=sys.stderr)
        app = create_app(model, hosts=hosts, **options)
        timeout: float = app.state.service.limits.timeout
        config = uvicorn.Config(
            app,
            http=protocol(timeout),
            ws="none",
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=int(timeout) + GRACE_SECONDS,
        )
        return announcing(config, address(host, door), watch), door
    except BaseException:
        door.close()
        raise


def need_extra() -> None:
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise MixlabError(f"Serving needs {', '.join(missing)}: pip install 'mixlab[serve]'.")


def load(path: str | PathLike[str]) -> Model | DenseModel:
    return create_model(weights=path) if task_of(path) == "classification" else load_dense(Path(path))


def check_token(token: str | None) -> None:
    if token is not None and (not token or not token.isascii() or not token.isprintable() or " " in token):
        raise ConfigError("A token is one or more ASCII letters, digits and signs without spaces.")


# -- the socket ----------------------------------------------------------------------------------


def bound(host: str, port: int) -> socket.socket:
    """A socket that holds the port before the model is loaded; it listens only when requests can be answered."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"A port is a number from 0 to 65535; got {port}.")
    try:
        family, kind, number, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        door = socket.socket(family, kind, number)
        try:
            if os.name == "posix":  # on Windows it would let two programs have one port
                door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            door.bind(place)
        except BaseException:
            door.close()
            raise
    except (OSError, UnicodeError) as error:
        told = getattr(error, "strerror", None) or error
        raise ConfigError(f"Cannot serve at {host}, port {port}: {told}. Choose another.") from error
    return door


def address_of(door: socket.socket) -> str:
    return str(door.getsockname()[0]).partition("%")[0]


def is_loopback(door: socket.socket) -> bool:
    return ipaddress.ip_address(address_of(door)).is_loopback


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def address(host: str, door: socket.socket) -> str:
    return f"http://{in_url(host)}:{door.getsockname()[1]}"


# -- the server ----------------------------------------------------------------------------------


def protocol(timeout: float) -> Any:
    from mixlab.deploy.serving.protocol import PromptProtocol

    limits = {"header_seconds": min(timeout, PromptProtocol.header_seconds), "answer_seconds": timeout}
    return type("Protocol", (PromptProtocol,), limits)


def announcing(config: Any, place: str, watch: Callable[[str], None]) -> Any:
    """A uvicorn server that tells its address once it listens."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                watch(place)

    return Server(config)
