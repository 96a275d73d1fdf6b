"""Law: with refuse_private, no byte goes to an address that is not public, however a URL, a name or a redirect leads
there; without it, or to a proxy, connections are as ever."""

import ipaddress
import socket

import pytest
import web

from ppldm.prepare.download import fetch as hosts
from ppldm.prepare.download.failures import classify
from ppldm.prepare.download.fetch import Fetcher, FetchError, FetchSettings, is_named_private, is_public

PRIVATE = [
    "127.0.0.1", "127.9.9.9", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254", "0.0.0.0",
    "100.64.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1",
    "fd12::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "2002:a00:1::", "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
]  # fmt: skip
PUBLIC = ["8.8.8.8", "1.1.1.1", "172.32.0.1", "172.15.0.1", "192.169.0.1", "100.128.0.1", "2606:4700::1111"]
PUBLIC += ["::ffff:8.8.8.8", "2002:808:808::", "64:ff9b::808:808"]


def only(public: str):
    """In place of `is_public`: of all addresses, this one is."""
    return lambda address: str(ipaddress.ip_address(address)) == public


@pytest.fixture
def server():
    with web.serve() as running:
        yield running


def fetch(url, refuse_private=True) -> str:
    """The class of what becomes of a URL."""
    settings = FetchSettings(timeout=2, retries=0, url_seconds=10, max_bytes=10**6, refuse_private=refuse_private)
    found = Fetcher(settings).fetch(url)
    return classify("failed_to_download", str(found)) if isinstance(found, FetchError) else "success"


@pytest.mark.parametrize("address", PRIVATE)
def test_private(address):
    assert not is_public(address) and is_named_private(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public(address):
    assert is_public(address) and not is_named_private(address)


@pytest.mark.parametrize(
    "name", ["localhost", "LOCALHOST.", "a.localhost", "127.1", "2130706433", "0x7f.1", "0177.0.0.1"]
)
def test_names_that_are_private(name):
    assert is_named_private(name)


def test_names_that_need_a_look_up():
    assert not any(map(is_named_private, ["example.com", "localhost.example.com", "notlocalhost", "", "a\0b"]))


def test_nothing_reaches_a_private_host(server):
    for host in ("127.0.0.1", "localhost", "127.1", "2130706433", "%31%32%37.0.0.1", "[::ffff:127.0.0.1]"):
        assert fetch(server.url("good/1.jpg", host)) == "private", host
        assert fetch(server.url("good/1.jpg", host).replace("http:", "https:")) == "private", host
        assert fetch(server.url("good/1.jpg", f"me:you@{host}")) == "private", host
    assert not server.hits
    assert fetch(server.url("good/1.jpg"), refuse_private=False) == "success"


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_name_that_resolves_to_a_private_address_is_refused(server, monkeypatch, scheme):
    look_up = socket.getaddrinfo
    inner = {"inner.test": "127.0.0.1"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *args, **kw: look_up(inner.get(host, host), *args, **kw))
    assert fetch(server.url("good/1.jpg", "inner.test").replace("http", scheme)) == "private" and not server.hits
    assert fetch(server.url("good/1.jpg", "inner.test").replace("http", scheme), False) in ("success", "tls")


def test_redirects_are_checked(server, monkeypatch):
    monkeypatch.setattr(hosts, "is_public", only("127.0.0.1"))
    assert fetch(server.url("redirect")) == "success"
    for host in ("127.0.0.2", "localhost"):
        assert fetch(server.url(f"to/?{server.url('good/1.jpg', host)}")) == "private"
    assert not server.hits["good/1.jpg"]


def test_the_address_that_is_checked_is_the_one_connected_to(server, monkeypatch):
    """A name that is public when first asked for, and private the next time."""
    asked, look_up = [], socket.getaddrinfo

    def rebinding(host, *args, **kwargs):
        if host == "evil.test":
            asked.append(host)
            host = "127.0.0.1" if len(asked) > 1 else "127.0.0.2"
        return look_up(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    monkeypatch.setattr(hosts, "is_public", only("127.0.0.2"))
    assert fetch(server.url("good/1.jpg", "evil.test")) in ("success", "refused") and asked == ["evil.test"]
    assert not server.hits  # the server is at 127.0.0.1 only
    assert fetch(server.url("good/1.jpg", "evil.test")) == "private" and len(asked) == 2
    assert not server.hits


def test_of_several_addresses_the_public_ones_are_taken(server, monkeypatch):
    look_up = socket.getaddrinfo

    def several(host, *args, **kwargs):
        names = ["127.0.0.3", "127.0.0.1"] if host == "two.test" else [host]
        return [found for name in names for found in look_up(name, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", several)
    monkeypatch.setattr(hosts, "is_public", only("127.0.0.1"))
    assert fetch(server.url("good/1.jpg", "two.test")) == "success"


def test_a_proxy_may_be_private_and_its_targets_may_not(server, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url(""))
    monkeypatch.setenv("no_proxy", "direct.test")
    assert fetch("http://example.test/good/1.jpg") == "4xx"  # the proxy of this test has no such page, and was asked
    assert server.hits.total() == 1
    for host in ("127.0.0.1", "localhost", "%31%32%37.0.0.1", "127.1"):
        assert fetch(f"http://{host}/good/1.jpg") == "private"
    assert server.hits.total() == 1
