"""A broken network and dead links are told apart."""

import pytest

from ppldm.prepare.download.failures import Outcome, find_network_fault, without_password

MESSAGES = {
    "dns": "<urlopen error [Errno -2] Name or service not known>",
    "resolver": "<urlopen error [Errno -3] Temporary failure in name resolution>",
    "tls": "<urlopen error [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed>",
    "proxy": "HTTP Error 407: Proxy Authentication Required",
    "refused": "<urlopen error [Errno 111] Connection refused>",
    "unreachable": "<urlopen error [Errno 101] Network is unreachable>",
    "timeout": "<urlopen error timed out>",
    "4xx": "HTTP Error 404: Not Found",
    "5xx": "HTTP Error 503: Service Unavailable",
}


def outcomes(total=100, host="host{}.invalid", **counts) -> list[Outcome]:
    """So many failures of each kind, successes for the rest, each URL on a host of its own."""
    names = [name for name, count in counts.items() for _ in range(count)]
    names += ["success"] * (total - len(names))
    return [
        Outcome(f"http://{host.format(number)}/a.jpg", "success", None)
        if name == "success"
        else Outcome(f"http://{host.format(number)}/a.jpg", "failed_to_download", MESSAGES[name.lstrip("_")])
        for number, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    "counts, word",
    [
        ({"dns": 60}, "DNS"),
        ({"resolver": 8}, "DNS"),
        ({"tls": 40}, "TLS"),
        ({"proxy": 10}, "proxy"),
        ({"refused": 20, "unreachable": 20}, "no connection"),
        ({"timeout": 60}, "in time"),
    ],
)
def test_a_broken_network_is_named(counts, word):
    assert word in find_network_fault(outcomes(**counts))


@pytest.mark.parametrize(
    "counts",
    [{}, {"_4xx": 95, "_5xx": 5}, {"dns": 25, "_4xx": 40, "timeout": 20, "refused": 5}, {"tls": 15}, {"resolver": 4}],
)
def test_dead_links_are_no_fault_of_the_network(counts):
    assert find_network_fault(outcomes(**counts)) is None


@pytest.mark.parametrize("name", ["dns", "resolver", "refused", "timeout"])
def test_one_dead_host_is_no_dead_network(name):
    dead = outcomes(90, "gone.invalid", **{name: 90})
    assert find_network_fault(dead + outcomes(10)) is None
    assert find_network_fault(dead) is None


def test_nothing_at_all_is_a_fault_before_the_start():
    assert "not one of 90 URLs" in find_network_fault(outcomes(90, "one.invalid", refused=90), ask_again=True)
    assert find_network_fault(outcomes(90, "one.invalid", refused=89), ask_again=True) is None


def test_the_resolver_and_the_name_are_told_apart():
    assert "DNS" in find_network_fault(outcomes(resolver=10)) and find_network_fault(outcomes(dns=10)) is None


def test_few_failures_prove_nothing():
    assert find_network_fault(outcomes(7, resolver=7)) is None


def test_the_resolver_is_to_blame_where_it_answers_when_asked_again(monkeypatch):
    monkeypatch.setattr("ppldm.prepare.download.failures._PAUSE_SECONDS", 0)
    monkeypatch.setattr("ppldm.prepare.download.failures._LOOKUPS", 1)
    gone = outcomes(100, "{}" + "x" * 70 + ".invalid", dns=10)  # no name of DNS: the network is not asked
    assert find_network_fault(gone, ask_again=True) is None
    flaky = [Outcome(f"http://127.0.0.{number}/a", "failed_to_download", MESSAGES["dns"]) for number in range(1, 11)]
    fault = find_network_fault(flaky + outcomes(90), ask_again=True)
    assert "10 of 100 hosts (10%), at least 8 of them because the resolver fails" in fault


@pytest.mark.parametrize("password", ["geheim", "ge/heim", "ge@heim", "ge%2Fheim"])
def test_passwords_stay_out_of_messages(monkeypatch, password):
    monkeypatch.setenv("http_proxy", f"http://me:{password}@proxy.example:3128")
    for counts in ({"proxy": 50}, {"refused": 50}):
        fault = find_network_fault(outcomes(**counts))
        assert "http=proxy.example:3128" in fault and "heim" not in fault and "me:" not in fault
    password = password.replace("/", "")  # which ends the host of a URL
    secret = [Outcome(f"http://me:{password}@host{n}.invalid/@a", "failed_to_download", "timed out") for n in range(20)]
    assert "heim" not in (find_network_fault(secret, ask_again=True) or "")


def test_a_url_without_its_password():
    assert without_password("http://me:p@ss@host/a@b?c@d") == "http://host/a@b?c@d"
    assert without_password("http://host/a@b") == "http://host/a@b"
    assert without_password("nonsense") == "nonsense"
