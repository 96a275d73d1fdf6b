"""An S3 server of this machine (moto's), and what goes wrong with servers and what lies between.

It is a process of its own, since processes that tests fork would have its sockets too.
"""

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "hidden-secret", "AWS_DEFAULT_REGION": "us-east-1"}


class S3Here:
    """The server, as tests see it."""

    def __init__(self, process: subprocess.Popen):
        self._process = process
        self.url = f"http://127.0.0.1:{json.loads(process.stdout.readline())}"

    def fail(self, *faults: str, every: int = 1) -> None:
        """Each fault once, at every so many of the further requests: a status such as "503", "cut" (half a body),
        "flip" (a body with a wrong byte), "hang up", "kill" (the server is gone for half a second)."""
        self.tell(faults=[one for fault in faults for one in (*[""] * (every - 1), fault)])

    def tell(self, **settings) -> None:
        """`latency`: seconds before each answer. `gone`: whether it does not listen; what is stored stays."""
        self._ask(settings)

    def requests(self) -> list[tuple[str, str]]:
        """(method, path) of all since it was last asked."""
        return [tuple(one) for one in self._ask({})["requests"]]

    def faults_left(self) -> int:
        return self._ask({})["faults"]

    def _ask(self, settings: dict) -> dict:
        self._process.stdin.write(json.dumps(settings) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def s3_here():
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        yield S3Here(process)
        process.stdin.close()


@contextmanager
def empty_bucket(server: S3Here, monkeypatch, bucket: str = "bucket"):
    """The server with nothing but an empty bucket, and an environment that names it. Libraries that try again do not
    wait for it as long as for a server far away."""
    from ppldm.utils.store import client

    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds, *result: sleep(seconds / 100, *result))
    server.tell(latency=0, faults=[], gone=False)
    urllib.request.urlopen(f"{server.url}/moto-api/reset", b"").close()
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": server.url, "PPLDM_STORE_RETRY_SECONDS": "60"}.items():
        monkeypatch.setenv(name, value)
    for memory in (client._known, client._surveyed, client._opened):
        memory.clear()
    urllib.request.urlopen(urllib.request.Request(f"{server.url}/{bucket}", method="PUT", headers={
        "Authorization": "AWS4-HMAC-SHA256 Credential=key/20200101/us-east-1/s3/aws4_request"})).close()  # fmt: skip
    server.requests()
    yield server
    server.tell(faults=[])


class Served:
    """What runs in the server's process."""

    def __init__(self):
        from moto.server import DomainDispatcherApplication, create_backend_app

        self.latency, self.faults, self.requests, self.port = 0.0, [], [], 0
        self.app, self.server = DomainDispatcherApplication(create_backend_app), None

    def start(self) -> None:
        from werkzeug.serving import make_server

        self.server = make_server("127.0.0.1", self.port, self.answer, threaded=True)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        if self.server:
            self.server.shutdown()
            self.server.server_close()
            self.server = None

    def be_gone(self) -> None:
        self.stop()
        time.sleep(0.5)
        self.start()

    def apply(self, settings: dict) -> dict:
        self.latency, self.faults = settings.get("latency", self.latency), settings.get("faults", self.faults)
        if settings.get("gone"):
            self.stop()
        elif "gone" in settings and not self.server:
            self.start()
        requests, self.requests = self.requests, []
        return {"requests": requests if not settings else [], "faults": len(self.faults)}

    def answer(self, environ, start_response):
        self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        time.sleep(self.latency)
        # What damages a body waits for a request that has one.
        is_get = environ["REQUEST_METHOD"] == "GET"
        fault = next((one for one in self.faults if is_get or one not in ("cut", "flip")), "")
        if fault in self.faults:
            self.faults.remove(fault)
        if fault == "kill":
            threading.Thread(target=self.be_gone).start()
        if fault in ("kill", "hang up"):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return []
        if fault.isdigit():
            start_response(f"{fault} Fault", [("Content-Length", "0")])
            return []
        if fault not in ("cut", "flip"):
            return self.app(environ, start_response)
        body = b"".join(self.app(environ, start_response))
        return [body[: len(body) // 2] if fault == "cut" else bytes([body[0] ^ 1]) + body[1:]] if body else [body]


def main() -> None:
    served, answers = Served(), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what moto prints
    served.start()
    for answer in itertools.chain([served.port], (served.apply(json.loads(line)) for line in sys.stdin)):
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
