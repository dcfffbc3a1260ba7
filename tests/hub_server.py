"""A small web server on this machine that speaks as much of the Hub's protocol as its real client asks for."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0" * 40


class Hub(ThreadingHTTPServer):
    """`files` maps paths such as "/owner/name/resolve/main/config.json" to bytes; of those in `cut` half is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files: dict[str, bytes] = {}
        self.cut: set[str] = set()
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def put(self, repository: str, file: str, content: bytes) -> None:
        self.files[f"/{repository}/resolve/main/{file}"] = content


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.give(body=False)

    def do_GET(self) -> None:
        self.give(body=True)

    def give(self, *, body: bool) -> None:
        self.server.asked.append(self.path)
        path = self.path.replace(f"/{COMMIT}/", "/main/")
        content = self.server.files.get(path)
        if content is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content[: len(content) // 2] if path in self.server.cut else content)

    def do_POST(self) -> None:
        self.server.asked.append(self.path)
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            told = json.loads(sent)
            name = f"{told['organization']}/{told['name']}"
            self.tell({"url": f"{self.server.address}/{name}", "id": name, "name": name})
        elif "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(sent)["files"]
            ]
            self.tell({"files": files})
        elif "/commit/" in self.path:
            repository = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in map(json.loads, sent.splitlines()):
                if line["key"] == "file":
                    self.server.put(repository, line["value"]["path"], base64.b64decode(line["value"]["content"]))
            self.tell(
                {
                    "success": True,
                    "commitUrl": f"{self.server.address}/{repository}/commit/{COMMIT}",
                    "commitOid": COMMIT,
                }
            )
        else:
            self.tell({"warnings": [], "errors": []})

    def tell(self, what: object) -> None:
        content = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
