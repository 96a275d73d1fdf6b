"""A page that this machine serves to its own user, by Flask (which VisualDL brings): `ppldm app`, `ppldm watch`.

The page is one text without anything from elsewhere. All other answers are JSON, errors too: {"error": "a sentence"}.
Nobody's page but its own may ask it, show it in a frame, or reach it by another site's name (DNS rebinding).
"""

import ipaddress
import secrets
import socket
from urllib.parse import urlsplit

from .errors import ConfigError, PpldmError
from .log import get_logger

MAX_REQUEST_BYTES = 64 << 10
# What HTTP's own errors mean here, by status; a page adds its own.
_SENTENCES = {
    400: "the request is not JSON",
    404: "there is no such page; the page is at /",
    405: "this page does not take that method",
    413: f"the request is larger than {MAX_REQUEST_BYTES >> 10} kB",
    415: "the request is not JSON; send it with Content-Type: application/json",
}
_HEADERS = {"X-Frame-Options": "DENY", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


def make_flask(hosts=(), sentences=None, images: str = "data:"):
    """A Flask application that answers its own page alone. hosts: further names of this machine. sentences: what HTTP's
    errors mean, by status. images: where pictures may come from, as a Content-Security-Policy says it."""
    from flask import Flask, g, jsonify, request
    from werkzeug.exceptions import HTTPException

    flask, sentences = Flask("ppldm"), {**_SENTENCES, **(sentences or {})}
    flask.config["MAX_CONTENT_LENGTH"] = MAX_REQUEST_BYTES
    flask.json.sort_keys = False

    @flask.before_request
    def refuse_strangers():
        if not is_own_host(request.host, hosts):
            return jsonify(error=f"{request.host[:80]} is not this machine; name it with --allow-host"), 403
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.host:
            return jsonify(error="the request comes from another site's page"), 403

    @flask.after_request
    def protect(response):
        nonce = f"'nonce-{g.nonce}'" if "nonce" in g else "'none'"
        response.headers["Content-Security-Policy"] = (
            f"default-src 'none'; script-src {nonce}; style-src {nonce}; img-src {images}; connect-src 'self'; "
            "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
        )
        response.headers.update(_HEADERS)
        return response

    @flask.errorhandler(PpldmError)
    def refused(error):
        return jsonify(error=str(error)), 400

    @flask.errorhandler(HTTPException)
    def failed(error):
        return jsonify(error=sentences.get(error.code, f"HTTP {error.code}: {error.name}")), error.code

    return flask


def render_page(template: str, **values) -> str:
    """The page of the request that is answered: a Jinja template whose style and script have {{ nonce }}."""
    from flask import g, render_template_string

    g.nonce = secrets.token_urlsafe(16)
    return render_template_string(template, nonce=g.nonce, **values)


def serve(flask, host: str, port: int, end: str = "") -> None:
    """Answer until Ctrl-C. end: of the address that is logged. Raises ConfigError."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Silent(WSGIRequestHandler):
        """A line for each request would drown ours."""

        def log_request(self, code="-", size="-"):
            pass

    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port {port} must be from 0 (any) to 65535")
    try:
        server = make_server(host, port, flask, threaded=True, request_handler=Silent)
    except (OSError, SystemExit) as error:
        raise ConfigError(f"cannot listen at {host}:{port}; choose another --port or --host") from error
    get_logger().info("http://%s:%d/%s (Ctrl-C stops it)", f"[{host}]" if ":" in host else host, server.port, end)
    server.serve_forever()


def is_own_host(host: str, names=()) -> bool:
    """Whether a Host header, name:port, is an address, localhost, this machine's name, or one of `names`.

    Another site's name that leads to this address is refused: its pages could read what is shown here (DNS rebinding).
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        own = ("localhost", socket.gethostname(), socket.getfqdn(), *names)
        return name in {one.lower() for one in own}


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
