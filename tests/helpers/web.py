"""A web of one machine: real pictures, and every way in which servers misbehave."""

import base64
import gzip
import io
import threading
import time
import zlib
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image

from ppldm.data.images import FORMATS


def picture(seed: int, size=(48, 36)) -> Image.Image:
    """Blocks of random colours, `size` = (width, height)."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize(size, Image.Resampling.NEAREST)


def encode(image: Image.Image, image_format="JPEG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def turned(image: Image.Image, image_format="JPEG") -> bytes:
    """A file that its EXIF data says to turn by a quarter."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(image, image_format, exif=exif)


def huge_png_header() -> bytes:
    """A PNG file that says to be 64,250 x 64,250 pixels, and ends there."""
    small = bytearray(encode(picture(0, (1, 1)), "PNG"))
    small[16:24] = (64250).to_bytes(4, "big") * 2
    small[29:33] = __import__("zlib").crc32(bytes(small[12:29])).to_bytes(4, "big")
    return bytes(small)


def animation(image: Image.Image) -> bytes:
    return encode(image, "GIF", save_all=True, append_images=[picture(99, image.size)])


def sixteen_bit(image_format="PNG") -> bytes:
    ramp = np.linspace(0, 65535, 48 * 36).reshape(36, 48).astype(np.uint16)
    return encode(Image.fromarray(ramp), image_format)


def many_scans(scans: int, size=(48, 36)) -> bytes:
    """A progressive JPEG that repeats its last scan."""
    jpeg = encode(picture(24, size), progressive=True)
    last = jpeg.rindex(b"\xff\xda")
    return jpeg[:last] + jpeg[last:-2] * scans + jpeg[-2:]


def transparent(image: Image.Image) -> bytes:
    image = image.convert("RGBA")
    image.putalpha(0)
    return encode(image, "PNG")


# Pictures that must arrive, by path.
PICTURES = {
    "cmyk.jpg": encode(picture(1).convert("CMYK")),
    "grey.jpg": encode(picture(2).convert("L")),
    "16bit.png": sixteen_bit(),
    "animated.gif": animation(picture(3)),
    "picture.webp": encode(picture(4), "WEBP"),
    "turned.jpg": turned(picture(5, (90, 72))),
    "turned-small.jpg": turned(picture(6)),
    "transparent.png": transparent(picture(7)),
    "large.jpg": encode(picture(8, (300, 200))),
    "wrong-type.jpg": encode(picture(9)),
    "redirected": encode(picture(10)),
    "name with spaces é.jpg": encode(picture(11)),
    "scan.tiff": encode(picture(16), "TIFF"),
    "turned.tiff": turned(picture(17, (90, 72)), "TIFF"),
    "16bit.tiff": sixteen_bit("TIFF"),
    "cmyk.tiff": encode(picture(18).convert("CMYK"), "TIFF", compression="tiff_deflate"),
    **({"new.avif": encode(picture(19), "AVIF")} if "AVIF" in FORMATS else {}),
    "gzip.jpg": encode(picture(12)),
    "deflate.jpg": encode(picture(13)),
    "bare-deflate.jpg": encode(picture(14)),
    "said-to-be-gzip.jpg": encode(picture(15)),
}
# Content-Encoding that nobody asked for, and what it makes of a body.
_ENCODINGS = {
    "gzip.jpg": ("gzip", gzip.compress),
    "deflate.jpg": ("deflate", zlib.compress),
    "bare-deflate.jpg": ("deflate", lambda body: zlib.compress(body)[2:-4]),
    "said-to-be-gzip.jpg": ("gzip", bytes),
}
# Paths of what must fail, with the class of failure.
FAILURES = {
    "missing.jpg": "4xx",
    "forbidden.jpg": "4xx",
    "broken.jpg": "5xx",
    "loop": "redirect",
    "silent.jpg": "timeout",
    "drip.jpg": "deadline",
    "drip-headers.jpg": "deadline",
    "endless.jpg": "too_large",
    "truncated.jpg": "decode",
    "short.jpg": "reset",
    "page.jpg": "decode",
    "empty.jpg": "empty",
    "no-content.jpg": "empty",
    "brotli.jpg": "decode",
    "half-gzip.jpg": "decode",
    "gzip-bomb.jpg": "too_large",
    "retitled.jpg": "4xx",
    "huge.png": "too_large",
    "opted-out.jpg": "opt_out",
    "hung-up.jpg": "reset",
    "scans.jpg": "decode",
    "early-for-ever.jpg": "too_large",
}
_SCANS = many_scans(10_000)
_STATUS = {"missing.jpg": 404, "forbidden.jpg": 403, "broken.jpg": 503}
# `/good/N.jpg` is always there; `/late/N.jpg` once the server is `healed`; `/busy/N.jpg` when asked for again, a
# second later; `/slow/N.jpg` after a while; `/early/103-102/N.jpg` after answers of these statuses; `/secret/N.jpg`
# for user "me", password "p@ss"; `/to?URL` leads to the URL; `/limited.jpg` asks to be left alone for a day.
OPT_OUT = "noai"
ESCAPES = b"\x1b]0;owned\x07\x1b[2J\x9b31m"


class Web(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hits, self.healed, self.closing = Counter(), False, threading.Event()
        self.running, self.most_running, self.lock = 0, 0, threading.Lock()
        self.busy_until: dict[str, float] = {}

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server_port}/{path}"

    def handle_error(self, request, client_address):
        """Clients hang up here by design."""


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def send_slowly(self, name: str):
        """A picture after 50 ms, in which the server counts how many it is asked for at once."""
        with self.server.lock:
            self.server.running += 1
            self.server.most_running = max(self.server.most_running, self.server.running)
        time.sleep(0.05)
        with self.server.lock:
            self.server.running -= 1
        self.send(encode(picture(int(name.removesuffix(".jpg")))))

    def send_when_asked_again(self, path: str, name: str):
        """429 with Retry-After, until that time is over."""
        now = time.monotonic()
        if now >= self.server.busy_until.setdefault(path, now + 1):
            return self.send(encode(picture(int(name.removesuffix(".jpg")))))
        self.send_status(429, Retry_After="1")

    def send_status(self, status: int, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def send(self, body: bytes, content_type="image/jpeg", length=None, **headers):
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def drip(self, data: bytes):
        for byte in data:
            if self.server.closing.wait(0.2):
                return
            self.wfile.write(bytes([byte]))

    def do_GET(self):
        from urllib.parse import unquote

        path = unquote(self.path.partition("?")[0]).lstrip("/")
        self.server.hits[path] += 1
        kind, _, name = path.partition("/")
        if kind == "to":
            self.send_status(302, Location=unquote(self.path.partition("?")[2]))
        elif kind == "early":
            statuses, _, name = name.partition("/")
            for status in statuses.split("-"):
                self.wfile.write(b"HTTP/1.1 %d Early\r\nLink: </a.css>; rel=preload\r\n\r\n" % int(status))
            self.send(encode(picture(int(name.removesuffix(".jpg")))))
        elif kind == "slow":
            self.send_slowly(name)
        elif kind == "busy":
            self.send_when_asked_again(path, name)
        elif kind == "secret":
            wanted = "Basic " + base64.b64encode(b"me:p@ss").decode()
            if self.headers.get("Authorization") == wanted:
                self.send(encode(picture(int(name.removesuffix(".jpg")))))
            else:
                self.send_error(401)
        elif kind == "good" or (kind == "late" and self.server.healed):
            self.send(encode(picture(int(name.removesuffix(".jpg")))))
        elif kind == "late":
            self.send_error(503)
        elif path in _STATUS:
            self.send_error(_STATUS[path])
        elif path in ("redirect", "loop"):
            self.send_response(302)
            self.send_header("Location", "/redirected" if path == "redirect" else "/loop")
            self.end_headers()
        elif path == "silent.jpg":
            self.server.closing.wait(60)
        elif path == "drip.jpg":
            self.send(b"", length=1000)
            self.drip(bytes(1000))
        elif path == "drip-headers.jpg":
            self.drip(b"HTTP/1.0 200 OK\r\n" + b"X-Slow: 1\r\n" * 100)
        elif path == "endless.jpg":
            self.send_response(200)
            self.end_headers()
            while not self.server.closing.is_set():
                self.wfile.write(bytes(1 << 16))
        elif path == "truncated.jpg":
            self.send(encode(picture(20, (256, 256)))[:-900])
        elif path == "short.jpg":
            self.send(encode(picture(21)), length=10**5)
        elif path == "page.jpg":
            self.send(b"<html><body>Buy this picture</body></html>", "text/html")
        elif path == "empty.jpg":
            self.send(b"")
        elif path == "huge.png":
            self.send(huge_png_header(), "image/png")
        elif path == "opted-out.jpg":
            self.send(encode(picture(22)), X_Robots_Tag=OPT_OUT)
        elif path == "no-content.jpg":
            self.send_status(204)
        elif path == "brotli.jpg":
            self.send(b"\x1b\x03", Content_Encoding="br")
        elif path == "half-gzip.jpg":
            self.send(gzip.compress(encode(picture(23)))[:-30], Content_Encoding="gzip")
        elif path == "gzip-bomb.jpg":
            self.send(gzip.compress(bytes(10**7)), Content_Encoding="gzip")
        elif path == "retitled.jpg":
            self.wfile.write(b"HTTP/1.0 404 " + ESCAPES + b"x" * 5000 + b"\r\n\r\n")
        elif path == "limited.jpg":
            self.send_status(429, Retry_After="86400")
        elif path in _ENCODINGS:
            encoding, pack = _ENCODINGS[path]
            self.send(pack(PICTURES[path]), Content_Encoding=encoding)
        elif path == "early-for-ever.jpg":
            while not self.server.closing.is_set():
                self.wfile.write(b"HTTP/1.1 103 Early Hints\r\nLink: </%s.css>\r\n\r\n" % (b"a" * 8000))
        elif path == "scans.jpg":
            self.send(_SCANS)
        elif path == "hung-up.jpg":
            self.connection.close()
        elif path in PICTURES:
            self.send(PICTURES[path], "text/plain" if path == "wrong-type.jpg" else "image/jpeg")
        else:
            self.send_error(404)


@contextmanager
def serve():
    """A running `Web`, ended with the block."""
    with Web() as web:
        thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield web
        finally:
            web.closing.set()
            web.shutdown()
            thread.join()


def wait_for(condition, seconds=30.0):
    """Wait until condition() holds; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
