"""A server cannot hold a fetch longer, or send more, than the bounds say; what it says is harmless; where it asks to be
left alone, it is."""

import math
import ssl
import subprocess
import time

import pytest
import web

from ppldm.prepare.download.failures import TEMPORARY, classify
from ppldm.prepare.download.fetch import Fetcher, FetchError, FetchSettings, check_proxies, quote_url
from ppldm.utils.errors import ConfigError
from ppldm.utils.text import escape


@pytest.fixture(scope="module")
def server():
    with web.serve() as running:
        yield running


def fetcher(last_moment=math.inf, **changes) -> Fetcher:
    settings = {"timeout": 10.0, "retries": 0, "url_seconds": 30, "max_bytes": 10**6, "refuse_private": False}
    return Fetcher(FetchSettings(**settings | changes), last_moment)


def failure(url, last_moment=math.inf, **changes) -> str:
    """The class of what becomes of a URL."""
    return failure_of(fetcher(last_moment, **changes), url)


def failure_of(fetcher, url) -> str:
    failure = fetcher.fetch(url)
    assert isinstance(failure, FetchError)
    return classify("failed_to_download", str(failure))


@pytest.mark.parametrize("path", ["gzip.jpg", "deflate.jpg", "bare-deflate.jpg", "said-to-be-gzip.jpg"])
def test_an_encoding_that_nobody_asked_for_is_taken_off(server, path):
    assert fetcher().fetch(server.url(path)) == web.PICTURES[path]


@pytest.mark.parametrize("path", ["empty.jpg", "no-content.jpg", "brotli.jpg", "half-gzip.jpg", "gzip-bomb.jpg"])
def test_each_failure_has_its_class(path):
    with web.serve() as server:
        one = fetcher()
        assert failure_of(one, server.url(path)) == web.FAILURES[path]
        assert failure_of(one, server.url("limited.jpg")) == "limited"


def test_what_a_server_says_is_escaped_and_cut(server):
    message = str(fetcher().fetch(server.url("retitled.jpg")))
    assert message == escape(message) and message.startswith(
        "HTTP Error 404: \\u001b]0;owned\\u0007\\u001b[2J\\u009b31m"
    )
    assert len(message) == 300


def test_name_and_password_of_a_url_are_sent_and_go_nowhere_else(server):
    url, one = server.url("secret/1.jpg").replace("//", "//me:p%40ss@"), fetcher()
    assert one.fetch(url) == web.encode(web.picture(1))
    assert failure_of(one, server.url("secret/1.jpg")) == "4xx"
    assert failure_of(one, url.replace("p%40ss", "wrong")) == "4xx"
    assert one.fetch(server.url(f"to/?{url}")) == web.encode(web.picture(1))  # of a redirect too
    elsewhere = server.url("to/?/secret/1.jpg").replace("//127", "//me:p%40ss@127")
    assert failure_of(one, elsewhere) == "4xx"


@pytest.mark.parametrize("port", ["99999", "65536", "0", "abc", "-1", "٣"])
def test_a_port_that_cannot_be_is_no_url(server, port):
    assert failure(f"http://127.0.0.1:{port}/a.jpg") == "bad_url"
    assert failure(server.url(f"to/?http://127.0.0.1:{port.encode('ascii', 'ignore').decode() or 'x'}/")) == "bad_url"


def test_a_host_is_asked_for_few_urls_at_once():
    for limit, most in ((3, 3), (0, 12)):
        with web.serve() as server:
            urls = {number: server.url(f"slow/{number}.jpg") for number in range(12)}
            pictures = dict(fetcher(time.monotonic() + 20, requests_per_host=limit).fetch_all(urls, 12))
            assert pictures == {number: web.encode(web.picture(number)) for number in range(12)}
            assert server.most_running <= most and (limit == 0) == (server.most_running > 3)


def test_waiting_for_a_host_ends_with_the_shard():
    with web.serve() as server:
        one = fetcher(time.monotonic() + 2, requests_per_host=1)
        with one.hosts.slot("127.0.0.1", math.inf):
            assert failure_of(one, server.url("good/2.jpg")) == "deadline"


def test_a_host_that_asks_for_time_gets_it_and_is_asked_again():
    with web.serve() as server:
        assert fetcher().fetch(server.url("busy/1.jpg")) == web.encode(web.picture(1))
        assert server.hits["busy/1.jpg"] == 2
        one = fetcher(url_seconds=0.9)  # no time to wait: the URL fails at once, and not the others of its host
        assert failure_of(one, server.url("busy/2.jpg")) == "limited" and server.hits["busy/2.jpg"] == 1
        assert one.fetch(server.url("good/1.jpg")) == web.encode(web.picture(1))
    assert "limited" in TEMPORARY


def test_one_answer_does_not_stop_a_host():
    with web.serve() as server:
        one = fetcher(url_seconds=4)
        assert failure_of(one, server.url("limited.jpg")) == "limited" and server.hits["limited.jpg"] == 1
        assert one.fetch(server.url("good/1.jpg")) == web.encode(web.picture(1))


@pytest.mark.parametrize("statuses", [(103,), (102, 103, 103), (100, 103), (103, 100), (199,), (101,)])
def test_an_answer_before_the_answer_is_passed_over(statuses):
    with web.serve() as server:
        path = f"early/{'-'.join(map(str, statuses))}/1.jpg"
        assert fetcher().fetch(server.url(path)) == web.encode(web.picture(1))
        found = failure(server.url("early-for-ever.jpg"), url_seconds=2, max_bytes=10**5)
        assert found in ("deadline", "too_large")


@pytest.mark.parametrize("retries", [0, 2])
def test_a_broken_server_is_not_waited_for(retries):
    with web.serve() as server:
        assert failure(server.url("broken.jpg"), retries=retries) == "5xx"
        assert server.hits["broken.jpg"] == 1 + retries


@pytest.mark.parametrize("proxy", ["http://me:p/w@proxy:3128", "http://proxy:x", "http://:3128", "me:secret@proxy:0"])
def test_a_proxy_that_cannot_be_is_named_without_its_password(monkeypatch, proxy):
    monkeypatch.setenv("https_proxy", proxy)
    with pytest.raises(ConfigError, match="https_proxy is not") as caught:
        fetcher()
    assert "p/w" not in str(caught.value) and "secret" not in str(caught.value)
    monkeypatch.setenv("https_proxy", "me:secret@proxy:3128")
    check_proxies()


@pytest.mark.parametrize("path", ["drip.jpg", "drip-headers.jpg"])
def test_a_server_that_drips_is_given_up_in_time(server, path):
    started = time.monotonic()
    assert failure(server.url(path), url_seconds=0.8) == "deadline"
    assert time.monotonic() - started < 10  # the whole answer would take minutes


def test_a_server_that_never_ends_is_given_up(server):
    assert failure(server.url("endless.jpg")) == "too_large"


def test_an_announced_size_is_enough_to_refuse(server):
    assert failure(server.url("short.jpg"), max_bytes=99_999) == "too_large"


def test_silence_is_a_timeout(server):
    assert failure(server.url("silent.jpg"), timeout=0.3) == "timeout"


def test_nothing_is_fetched_after_the_last_moment(server):
    before = server.hits["good/1.jpg"]
    assert failure(server.url("good/1.jpg"), time.monotonic() - 1) == "deadline"
    assert server.hits["good/1.jpg"] == before


def test_redirects_share_the_time(server):
    one = fetcher()
    assert one.fetch(server.url("redirect")) == web.PICTURES["redirected"]
    assert failure_of(one, server.url("loop")) == "redirect"
    assert failure_of(one, server.url("missing.jpg")) == "4xx"
    assert failure(server.url(f"to/?{server.url('drip.jpg')}"), url_seconds=0.8) == "deadline"


@pytest.mark.parametrize("url", ["file:///etc/hostname", "data:image/png;base64,AAAA", "ftp://127.0.0.1/a.jpg"])
def test_only_the_web_is_read(server, url):
    assert failure(url) == "bad_url"
    assert failure(server.url(f"to/?{url}")) in ("bad_url", "redirect")


def test_urls_are_sent_as_browsers_send_them(server):
    assert fetcher().fetch(server.url("name with spaces é.jpg")) == web.PICTURES["name with spaces é.jpg"]


@pytest.mark.parametrize(
    "url", [None, "", "nonsense", "http://", "http:///a.jpg", "http://[::1/a.jpg", "http://a b\n/"]
)
def test_what_is_no_url_fails_as_such(url):
    assert failure(url) in ("bad_url", "dns")


@pytest.mark.parametrize(
    "told, token, forbidden",
    [("noai", "", True), ("NoAI , x", "", True), ("all, noimageai", "", True), ("all", "", False), ("", "", False),
     ("me: noai", "", False), ("me: noai", "me", True), ("Me: all, noai", " ME ", True), ("you: noai", "me", False),
     ("me: all", "me", False)],
)  # fmt: skip
def test_who_forbids_the_use_is_heard(monkeypatch, server, told, token, forbidden):
    monkeypatch.setattr(web, "OPT_OUT", told)
    one = fetcher(user_agent_token=token or None, disallowed_header_directives=("noai", " NoImageAI"))
    if forbidden:
        assert failure_of(one, server.url("opted-out.jpg")) == "opt_out"
    else:
        assert not isinstance(one.fetch(server.url("opted-out.jpg")), FetchError)


@pytest.mark.parametrize("num_threads", [1, 3, 20])
def test_each_url_comes_once_and_few_wait_to_be_taken(num_threads):
    with web.serve() as server:
        urls = {number: server.url(f"good/{number}.jpg" if number % 4 else "missing.jpg") for number in range(5, 25)}
        found = {}
        for number, fetched in fetcher().fetch_all(urls, num_threads):
            assert number not in found and server.hits.total() <= len(found) + 2 * num_threads
            found[number] = fetched
        assert found.keys() == urls.keys()
        assert {number for number, one in found.items() if isinstance(one, FetchError)} == {8, 12, 16, 20, 24}
        assert all(found[number] == web.encode(web.picture(number)) for number in urls if number % 4)


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
        assert failure(url) == "tls"
        assert fetcher(check_certificates=False).fetch(url) == web.encode(web.picture(1))
