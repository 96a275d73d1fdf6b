"""A server cannot hold a fetch longer, or send more, than the bounds say."""

import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request

import pytest
import web

from ppldm.laion.failures import classify
from ppldm.laion.fetch import Bounds, install, quote_url


@pytest.fixture(scope="module")
def server():
    with web.serve() as running:
        yield running


@pytest.fixture(autouse=True)
def default_opener():
    yield
    urllib.request.install_opener(None)


def fetch(url, timeout=1.0) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url), timeout=timeout) as answer:
        return answer.read()


def failure(url, timeout=1.0) -> str:
    with pytest.raises((OSError, ValueError)) as caught:
        fetch(url, timeout)
    return classify("failed_to_download", str(caught.value))


@pytest.mark.parametrize("path", ["drip.jpg", "drip-headers.jpg"])
def test_a_server_that_drips_is_given_up_in_time(server, path):
    install(Bounds(url_seconds=0.8, max_bytes=10**6))
    started = time.monotonic()
    assert failure(server.url(path)) == "deadline"
    assert time.monotonic() - started < 10  # the whole answer would take minutes


def test_a_server_that_never_ends_is_given_up(server):
    install(Bounds(url_seconds=30, max_bytes=10**6))
    assert failure(server.url("endless.jpg")) == "too_large"


def test_an_announced_size_is_enough_to_refuse(server):
    install(Bounds(url_seconds=30, max_bytes=99_999))
    assert failure(server.url("short.jpg")) == "too_large"


def test_silence_is_a_timeout(server):
    install(Bounds(url_seconds=30, max_bytes=10**6))
    assert failure(server.url("silent.jpg"), timeout=0.3) == "timeout"


def test_nothing_is_fetched_after_the_last_moment(server):
    before = server.hits["good/1.jpg"]
    install(Bounds(30, 10**6), last_moment=time.monotonic() - 1)
    assert failure(server.url("good/1.jpg")) == "deadline"
    assert server.hits["good/1.jpg"] == before


def test_redirects_share_the_time_and_count_once(server):
    count = []
    install(Bounds(30, 10**6), on_fetch=lambda: count.append(threading.get_ident()))
    assert fetch(server.url("redirect")) == web.PICTURES["redirected"]
    assert failure(server.url("loop")) == "redirect"
    assert failure(server.url("missing.jpg")) == "4xx"
    assert len(count) == 3


@pytest.mark.parametrize("url", ["file:///etc/hostname", "data:image/png;base64,AAAA", "ftp://127.0.0.1/a.jpg"])
def test_only_the_web_is_read(url):
    install(Bounds(30, 10**6))
    assert failure(url) == "bad_url"


def test_urls_are_sent_as_browsers_send_them(server):
    install(Bounds(30, 10**6))
    assert fetch(server.url("name with spaces é.jpg")) == web.PICTURES["name with spaces é.jpg"]


@pytest.mark.parametrize(
    "url, quoted",
    [
        ("http://a.b/c?d=e&f=%20#g", "http://a.b/c?d=e&f=%20#g"),
        (" http://a.b/c d ", "http://a.b/c%20d"),
        ("http://bücher.example:80/é", "http://xn--bcher-kva.example:80/%C3%A9"),
        ("http://[::1]/a|b", "http://[::1]/a%7Cb"),
    ],
)
def test_quoting(url, quoted):
    assert quote_url(url) == quoted == quote_url(quoted)


def test_a_host_that_cannot_be_is_no_url():
    with pytest.raises(ValueError, match="not a URL"):
        quote_url(f"http://{'ü' * 80}.com/")


@pytest.mark.needs("openssl")
def test_certificates_are_checked_unless_asked_otherwise(tmp_path):
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=nobody -keyout key.pem -out certificate.pem"
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")
    with web.serve() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        url = server.url("good/1.jpg").replace("http:", "https:")
        install(Bounds(30, 10**6))
        assert failure(url, timeout=10) == "tls"
        install(Bounds(30, 10**6), check_certificates=False)
        assert fetch(url, timeout=10) == web.encode(web.picture(1))
