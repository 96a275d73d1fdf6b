"""A server cannot hold a fetch longer, or send more, than the bounds say; what it says is harmless; where it asks to be
left alone, it is."""

import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import web

from ppldm.prepare.download.failures import TEMPORARY, classify
from ppldm.prepare.download.fetch import Bounds, FetchError, check_proxies, install, quote_url
from ppldm.utils.errors import ConfigError
from ppldm.utils.text import escape


@pytest.fixture(scope="module")
def server():
    with web.serve() as running:
        yield running


@pytest.fixture(autouse=True)
def default_opener():
    yield
    urllib.request.install_opener(None)


def fetch(url, timeout=10.0) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url), timeout=timeout) as answer:
        return answer.read()


def failure(url, timeout=10.0) -> str:
    with pytest.raises((OSError, ValueError)) as caught:
        fetch(url, timeout)
    return classify("failed_to_download", str(caught.value))


@pytest.mark.parametrize("path", ["gzip.jpg", "deflate.jpg", "bare-deflate.jpg", "said-to-be-gzip.jpg"])
def test_an_encoding_that_nobody_asked_for_is_taken_off(server, path):
    install(Bounds(30, 10**6))
    assert fetch(server.url(path)) == web.PICTURES[path]


@pytest.mark.parametrize("path", ["empty.jpg", "no-content.jpg", "brotli.jpg", "half-gzip.jpg", "gzip-bomb.jpg"])
def test_each_failure_has_its_class(path):
    with web.serve() as server:
        install(Bounds(30, 10**6))
        assert failure(server.url(path)) == web.FAILURES[path]
        assert failure(server.url("limited.jpg")) == "limited"


def test_what_a_server_says_is_escaped_and_cut(server):
    install(Bounds(30, 10**6))
    with pytest.raises(FetchError) as caught:
        fetch(server.url("retitled.jpg"))
    message = str(caught.value)
    assert message == escape(message) and message.startswith(
        "HTTP Error 404: \\u001b]0;owned\\u0007\\u001b[2J\\u009b31m"
    )
    assert len(message) == 300


def test_name_and_password_of_a_url_are_sent_and_go_nowhere_else(server):
    install(Bounds(30, 10**6))
    url = server.url("secret/1.jpg").replace("//", "//me:p%40ss@")
    assert fetch(url) == web.encode(web.picture(1))
    assert failure(server.url("secret/1.jpg")) == "4xx"
    assert failure(url.replace("p%40ss", "wrong")) == "4xx"
    assert fetch(server.url(f"to/?{url}")) == web.encode(web.picture(1))  # of a redirect too
    elsewhere = server.url("to/?/secret/1.jpg").replace("//127", "//me:p%40ss@127")
    assert failure(elsewhere) == "4xx"


@pytest.mark.parametrize("port", ["99999", "65536", "0", "abc", "-1", "٣"])
def test_a_port_that_cannot_be_is_no_url(server, port):
    install(Bounds(30, 10**6))
    assert failure(f"http://127.0.0.1:{port}/a.jpg") == "bad_url"
    assert failure(server.url(f"to/?http://127.0.0.1:{port.encode('ascii', 'ignore').decode() or 'x'}/")) == "bad_url"


def test_a_host_is_asked_for_few_urls_at_once():
    for limit, most in ((3, 3), (0, 12)):
        with web.serve() as server, ThreadPoolExecutor(12) as executor:
            install(Bounds(30, 10**6), requests_per_host=limit)
            pictures = list(executor.map(lambda n, server=server: fetch(server.url(f"slow/{n}.jpg")), range(12)))
            assert pictures == [web.encode(web.picture(n)) for n in range(12)]
            assert server.most_running <= most and (limit == 0) == (server.most_running > 3)


def test_waiting_for_a_host_ends_with_the_shard():
    with web.serve() as server:
        install(Bounds(30, 10**6), time.monotonic() + 2, requests_per_host=1)
        with urllib.request.urlopen(server.url("good/1.jpg"), timeout=1), ThreadPoolExecutor(1) as executor:
            assert executor.submit(failure, server.url("good/2.jpg")).result() == "deadline"


def test_a_host_that_asks_for_time_gets_it_and_is_asked_again():
    with web.serve() as server:
        install(Bounds(30, 10**6))
        assert fetch(server.url("busy/1.jpg")) == web.encode(web.picture(1))
        assert server.hits["busy/1.jpg"] == 2
        install(Bounds(0.9, 10**6))  # no time to wait: the URL fails at once, and not the others of its host
        assert failure(server.url("busy/2.jpg")) == "limited" and server.hits["busy/2.jpg"] == 1
        assert fetch(server.url("good/1.jpg")) == web.encode(web.picture(1))
    assert "limited" in TEMPORARY


def test_one_answer_does_not_stop_a_host():
    with web.serve() as server:
        install(Bounds(4, 10**6))
        assert failure(server.url("limited.jpg")) == "limited" and server.hits["limited.jpg"] == 1
        assert fetch(server.url("good/1.jpg")) == web.encode(web.picture(1))


@pytest.mark.parametrize("statuses", [(103,), (102, 103, 103), (100, 103), (103, 100), (199,), (101,)])
def test_an_answer_before_the_answer_is_passed_over(statuses):
    with web.serve() as server:
        install(Bounds(30, 10**6))
        path = f"early/{'-'.join(map(str, statuses))}/1.jpg"
        assert fetch(server.url(path)) == web.encode(web.picture(1))
        install(Bounds(2, 10**5))
        assert failure(server.url("early-for-ever.jpg")) in ("deadline", "too_large")


def test_a_broken_server_is_not_waited_for(server):
    install(Bounds(30, 10**6))
    assert failure(server.url("broken.jpg")) == "5xx"
    assert server.hits["broken.jpg"] == 1


@pytest.mark.parametrize("proxy", ["http://me:p/w@proxy:3128", "http://proxy:x", "http://:3128", "me:secret@proxy:0"])
def test_a_proxy_that_cannot_be_is_named_without_its_password(monkeypatch, proxy):
    monkeypatch.setenv("https_proxy", proxy)
    with pytest.raises(ConfigError, match="https_proxy is not") as caught:
        install(Bounds(30, 10**6))
    assert "p/w" not in str(caught.value) and "secret" not in str(caught.value)
    monkeypatch.setenv("https_proxy", "me:secret@proxy:3128")
    check_proxies()


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
