"""Laws: a host is left alone as long as it asks, or longer and longer; an answer that is good ends that."""

import time
from email.message import Message
from email.utils import formatdate
from urllib.error import HTTPError

import pytest

from ppldm.prepare.download.fetch import HostLimits, read_retry_after


def refusal(code=429, retry_after=None) -> HTTPError:
    headers = Message()
    if retry_after is not None:
        headers["Retry-After"] = retry_after
    return HTTPError("http://a/", code, "no", headers, None)


@pytest.mark.parametrize(
    "value, seconds",
    [("0", 0), ("12", 12), (" 3 ", 3), ("9" * 50, 3600), ("-1", None), ("", None), ("soon", None), ("1.5", None),
     ("\u0663", None), ("Wed, 21 Oct 2015 07:28:00 GMT", 0), ("Fri, 31 Dec 9999 23:59:59 GMT", 3600)],
)  # fmt: skip
def test_both_forms_of_retry_after_are_read(value, seconds):
    assert read_retry_after(value) == seconds


def test_a_date_is_counted_from_now():
    assert 95 < read_retry_after(formatdate(time.time() + 100, usegmt=True)) <= 100


def refuse_at(hosts: HostLimits, clock: list[float], times) -> list[float]:
    """The pauses after refusals at these times, in seconds."""
    pauses = []
    for clock[0] in times:
        assert hosts.note_refusal("a", refusal())
        pauses.append(hosts.pause_sec("a"))
    return pauses


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("ppldm.prepare.download.fetch.time.monotonic", lambda: now[0])
    return now


def test_pauses_double_up_to_a_minute_and_begin_anew_after_success(clock):
    hosts = HostLimits(0)
    pauses = refuse_at(hosts, clock, range(2000, 3000, 100))
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    clock[0] = 5000.0
    hosts.note_success("a")
    assert refuse_at(hosts, clock, [5001.0]) == [1]
    assert hosts.pause_sec("b") == 0


def test_refusals_of_requests_that_were_sent_together_count_once(clock):
    hosts = HostLimits(0)
    assert refuse_at(hosts, clock, [2000.0] * 20) == [1] * 20
    assert refuse_at(hosts, clock, [2000.5] * 20)[-1] == 1
    assert refuse_at(hosts, clock, [2002.0]) == [2]


def test_a_host_is_taken_at_its_word(clock):
    hosts = HostLimits(0)
    assert hosts.note_refusal("a", refusal(503, "7")) == 7 and hosts.pause_sec("a") == 7
    assert hosts.note_refusal("a", refusal(429, "5")) == 5 and hosts.pause_sec("a") == 7  # the longer wish holds
    clock[0] += 3
    assert hosts.pause_sec("a") == 4
    for error in (refusal(503), refusal(500, "9"), refusal(404, "9")):
        assert hosts.note_refusal("b", error) is None
    assert hosts.pause_sec("b") == 0


@pytest.mark.parametrize("asked", ["2099", "61", "Fri, 31 Dec 9999 23:59:59 GMT", "9" * 50])
def test_one_wish_does_not_stop_a_host_and_a_host_that_insists_is_left_alone(clock, asked):
    hosts = HostLimits(0, 60.0)
    pauses = []
    for _ in range(10):
        assert hosts.note_refusal("a", refusal(429, asked)) > 60
        hosts.note_refusal("a", refusal(429, asked))  # of a request that was sent with it
        pauses.append(hosts.pause_sec("a"))
        clock[0] += pauses[-1]
    most = read_retry_after(asked)
    assert pauses == pytest.approx([min(15 * 2**number, most) for number in range(10)], abs=1)
    hosts.note_success("a")
    hosts.note_refusal("a", refusal(429, asked))
    assert hosts.pause_sec("a") == pytest.approx(15)
