"""What this machine serves over HTTP, by Flask (which VisualDL brings): `ppldm app`, `ppldm serve`, `ppldm watch`.

A page is one text without anything from elsewhere. All other answers are JSON, errors too: {"error": "a sentence"}.
Nobody's page but its own may ask it, show it in a frame, or reach it by another site's name (DNS rebinding). Where
other machines reach it, whoever asks needs a token, but for the empty page.
"""

import io
import ipaddress
import secrets
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from urllib.parse import urlsplit

from ..errors import ConfigError, PpldmError
from ..log import get_logger
from ..processes.signals import handle
from .page import render

# What HTTP's own errors mean here, by status; a page adds its own.
_SENTENCES = {
    400: "the request is not JSON",
    404: "there is no such page; the page is at /",
    405: "this page does not take that method",
    415: "the request is not JSON; send it with Content-Type: application/json",
}
_HEADERS = {"X-Frame-Options": "DENY", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
_LOOK_SECONDS = 0.5
_QUIET_SECONDS = 60  # after which a connection is closed on which nothing comes


def make_flask(hosts=(), sentences=None, most_bytes: int = 64 << 10, token: str | None = None, open_paths=None):
    """A Flask application that answers its own page only. hosts: further names; sentences: what HTTP's errors mean.
    token: to bring as X-Token or Bearer, but not to read `open_paths` (None: not to read at all)."""
    from flask import Flask, g, request
    from werkzeug.exceptions import HTTPException

    large = f"the request is larger than {most_bytes >> 10} kB; make its words or pictures smaller"
    flask, sentences = Flask("ppldm"), {**_SENTENCES, 413: large, **(sentences or {})}
    flask.config["MAX_CONTENT_LENGTH"] = most_bytes
    flask.json.sort_keys = False

    @flask.before_request
    def refuse_strangers():
        if not is_own_host(request.host, hosts):
            return {"error": f"{request.host[:80]} is not this machine; name it with --allow-host"}, 403
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.host:
            return {"error": "the request comes from another site's page"}, 403
        if token is None or (request.method in ("GET", "HEAD") and (open_paths is None or request.path in open_paths)):
            return None
        given = request.headers.get("X-Token") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not (token and secrets.compare_digest(given.encode(), token.encode())):
            return {"error": "the token is missing or wrong; open the address that the terminal shows"}, 401

    @flask.after_request
    def protect(response):
        nonce = f"'nonce-{g.nonce}'" if "nonce" in g else "'none'"
        response.headers["Content-Security-Policy"] = (
            f"default-src 'none'; script-src {nonce}; style-src {nonce}; img-src blob:; connect-src 'self'; "
            "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
        )
        response.headers.update(_HEADERS)
        return response

    @flask.errorhandler(PpldmError)
    def refused(error):
        return {"error": str(error)}, 400

    @flask.errorhandler(RecursionError)
    def nested(error):
        return {"error": "the request is nested too deeply; send an object of plain values"}, 400

    @flask.errorhandler(HTTPException)
    def failed(error):
        return {"error": sentences.get(error.code, f"HTTP {error.code}: {error.name}")}, error.code

    return flask


def render_page(template: str, **values) -> str:
    """`page.render` of the request that is answered, whose policy allows its script by {{ nonce }}."""
    from flask import g

    g.nonce = secrets.token_urlsafe(16)
    return render(template, nonce=g.nonce, **values)


def serve(flask, host: str, port: int, end: str = "", finish: Callable[[], None] | None = None) -> None:
    """Answer until Ctrl-C, or until SIGTERM and the end of `finish()`, which is called then and which either signal
    cuts short. end: of the address that is logged. Raises ConfigError."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Silent(WSGIRequestHandler):
        """A line for each request would drown ours."""

        timeout = _QUIET_SECONDS

        def log_request(self, code="-", size="-"):
            pass

    check_port(port)
    try:
        with redirect_stderr(io.StringIO()):  # what werkzeug says of a port that is taken
            server = make_server(host, port, flask, threaded=True, request_handler=Silent)
    except (OSError, SystemExit) as error:
        fix = "another program may be there: stop it, or choose another --port or --host"
        raise ConfigError(f"cannot listen at {host}:{port}; {fix}") from error
    get_logger().info("open http://%s:%d/%s (Ctrl-C ends it)", f"[{host}]" if ":" in host else host, server.port, end)
    if finish is None:
        server.serve_forever()  # which a KeyboardInterrupt ends
        get_logger().info("stopped by Ctrl-C")
        return
    asked = threading.Event()
    before = handle(signal.SIGTERM, lambda *_: asked.set())

    def answer() -> None:
        server.serve_forever()
        asked.set()

    threading.Thread(target=answer, daemon=True).start()
    try:
        while not asked.wait(_LOOK_SECONDS):  # a signal that another thread took is seen when this one wakes
            pass
    except KeyboardInterrupt:
        get_logger().info("stopped by Ctrl-C")
        return
    handle(signal.SIGTERM, before)
    get_logger().info("stopping: what is under way is finished first")
    finish()
    server.shutdown()


def check_port(port: int) -> None:
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port {port} must be from 0 (any) to 65535")


def is_own_host(host: str, names=()) -> bool:
    """Whether a Host header, name:port, is an address, localhost, this machine's name, or one of `names`. Pages of
    another site's name that leads to this address could read what is shown here (DNS rebinding)."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    own = ("localhost", socket.gethostname(), socket.getfqdn(), *names)
    return _address(name) is not None or name in {one.lower() for one in own}


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches an address."""
    return host == "localhost" or getattr(_address(host), "is_loopback", False)


def _address(host: str):
    with suppress(ValueError):
        return ipaddress.ip_address(host)
