"""A server that plays the sources of data sets: the hub, other hosts (as a proxy does), lists of links; with faults."""

import hashlib
import json
import re
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Sources(ThreadingHTTPServer):
    """files: content by (repository or host, name). gated: repositories that want `token`. refused: names that answer
    403. busy: of each file, how often it first answers 429. drops: of each, how often its connection dies halfway."""

    daemon_threads = True

    def __init__(self, files: dict[tuple[str, str], bytes]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.gated, self.refused, self.token = files, set(), set(), "hf_secret"
        self.busy, self.drops, self.hits, self.sent = 0, 0, Counter(), Counter()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """Clients are killed here by design."""


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(False)

    def do_GET(self):
        self.answer(True)

    def answer(self, with_body: bool):
        server, where = self.server, urlsplit(self.path)
        host, path = where.netloc, unquote(where.path)
        if not host and (found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/(revision|tree)/.*", path)):
            return self.list_repository(found[1], found[2], with_body)
        found = re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/[^/]+/(.*)", path)
        key = (found[1], found[2]) if found and not host else (host, path.lstrip("/"))
        if key not in server.files:
            return self.reply(404, b"", {}, with_body)
        if key[0] in server.gated and self.headers.get("Authorization") != f"Bearer {server.token}":
            return self.reply(401, b"", {"X-Error-Code": "GatedRepo"}, with_body)
        if key[1] in server.refused:
            return self.reply(403, b"URL signature expired", {}, with_body)
        server.hits[key] += 1
        if server.hits[key] <= server.busy:
            return self.reply(429, b"", {"Retry-After": "0"}, with_body)
        self.send_file(key, with_body, drop=server.hits[key] <= server.busy + server.drops)

    def list_repository(self, name: str, kind: str, with_body: bool):
        files = [(path, content) for (repository, path), content in self.server.files.items() if repository == name]
        if not files:
            return self.reply(404, b"", {"X-Error-Code": "RepoNotFound"}, with_body)
        if kind == "revision":
            return self.reply(200, json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode(), {}, with_body)
        facts = [
            {
                "type": "file",
                "path": path,
                "size": len(content),
                "oid": "0",
                "lfs": {"size": len(content), "oid": hashlib.sha256(content).hexdigest(), "pointerSize": 1},
            }
            for path, content in files
        ]
        self.reply(200, json.dumps(facts).encode(), {"Content-Type": "application/json"}, with_body)

    def send_file(self, key, with_body: bool, drop: bool):
        content = self.server.files[key]
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        start, status, headers = 0, 200, {"ETag": etag}
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if asked and self.headers.get("If-Range") == etag:
            start, status = int(asked[1]), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        if not drop:
            self.server.sent[key] += len(body)
            return self.reply(status, body, headers, with_body)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: (len(body) + 1) // 2])
        self.server.sent[key] += (len(body) + 1) // 2
        self.close_connection = True

    def reply(self, status: int, body: bytes, headers: dict, with_body: bool):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@contextmanager
def serving(files: dict[tuple[str, str], bytes]):
    server = Sources(files)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def environment(server: Sources, home, token: str = "") -> dict[str, str]:
    """Of a process that reaches the server as the hub, and as the proxy to every host."""
    proxy = {"http_proxy": server.url, "HTTP_PROXY": server.url, "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}
    return {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_TOKEN": token, "OMP_NUM_THREADS": "1", **proxy}
