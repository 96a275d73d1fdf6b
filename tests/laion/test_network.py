"""A broken network and dead links are told apart."""

from collections import Counter

import pytest

from ppldm.laion.network import count_resolver_trouble, find_network_fault

AGAIN = "<urlopen error [Errno -3] Temporary failure in name resolution>"


@pytest.mark.parametrize(
    "counts, resolver_trouble, word",
    [
        ({"dns": 60}, 0, "DNS"),
        ({"dns": 8}, 8, "DNS"),
        ({"tls": 40}, 0, "TLS"),
        ({"proxy": 10}, 0, "proxy"),
        ({"refused": 20, "unreachable": 20}, 0, "no connection"),
        ({"timeout": 60}, 0, "in time"),
    ],
)
def test_a_broken_network_is_named(counts, resolver_trouble, word):
    assert word in find_network_fault(Counter(counts), 100, resolver_trouble)


@pytest.mark.parametrize(
    "counts",
    [{}, {"4xx": 95, "5xx": 5}, {"dns": 25, "4xx": 40, "timeout": 20, "refused": 5}, {"tls": 15}, {"decode": 100}],
)
def test_dead_links_are_no_fault_of_the_network(counts):
    assert find_network_fault(Counter(counts), 100, 2) is None


def test_few_failures_prove_nothing():
    assert find_network_fault(Counter(dns=7), 7) is None


def test_the_resolver_is_to_blame_where_it_says_so_or_answers_when_asked_again(monkeypatch):
    monkeypatch.setattr("ppldm.laion.network._PAUSE_SECONDS", 0)
    unknown = "<urlopen error [Errno -2] Name or service not known>"
    failures = [
        ("http://a/1", "failed_to_download", AGAIN),
        ("http://localhost/1", "failed_to_download", unknown),
        ("http://localhost/2", "failed_to_download", unknown),
        (f"http://{'x' * 70}.invalid/1", "failed_to_download", unknown),
        ("http://b/1", "failed_to_download", "HTTP Error 404: Not Found"),
    ]
    assert count_resolver_trouble(failures, 99) == 3
    assert count_resolver_trouble(failures, 1) == 1
