"""What every request passes first: the check of its Host, headers for browsers, and the counters."""

import json
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mixlab.deploy.serving.metrics import Metrics

PATHS = ("/", "/predict", "/healthz", "/metrics", "/about", "/openapi.json")
METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH")
OTHER = "other"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Gate:
    """`hosts` protects a server without a token on this machine from web pages whose name was rebound to it."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, hosts: frozenset[str] | None) -> None:
        self.app, self.metrics, self.hosts = app, metrics, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def passed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        try:
            if self.hosts is None or host_of(Headers(scope=scope)) in self.hosts:
                await self.app(scope, receive, passed)
            else:
                await misdirected(passed)
        finally:
            path, method = scope["path"], scope["method"]
            self.metrics.request(
                path if path in PATHS else OTHER,
                method if method in METHODS else OTHER,
                status,
                time.perf_counter() - started,
            )


def host_of(headers: Headers) -> str:
    """The name in the Host header, without the port."""
    name = headers.get("host", "").strip().lower()
    return name[: name.find("]") + 1] if name.startswith("[") else name.partition(":")[0]


async def misdirected(send: Any) -> None:
    told = "This server answers to localhost only. Start it with a token to reach it by other names."
    body = json.dumps({"detail": told, "image": None}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": 421, "headers": headers})
    await send({"type": "http.response.body", "body": body})
