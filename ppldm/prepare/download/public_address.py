"""Connections to the public internet only: what a list from the web names must not reach the machine's own networks.

A metadata list is written by strangers. `http://169.254.169.254/…` would hand a cloud machine's credentials to the data
set, `http://10.0.0.1/…` would press buttons of a router. The address is checked that is connected to, after the look-up
of every redirect, so a name that resolves to a private address, now or the next time, does not help either.
"""

import ipaddress
import socket

_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether an IPv4 or IPv6 address, given as text, belongs to the public internet.

    Loopback, link-local, private, shared (100.64.0.0/10), multicast and reserved addresses do not, nor do IPv6
    addresses that stand for such an IPv4 address (mapped, 6to4, NAT64).
    """
    ip = ipaddress.ip_address(address)
    if ip.version == 6:
        embedded = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            embedded = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if embedded:
            return is_public(str(embedded))
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


def is_named_private(host: str) -> bool:
    """Whether a host's name itself, without a look-up, says that it is not public: an address, or localhost.

    Addresses in the older spellings too, such as 127.1 and 2130706433.
    """
    name = host.lower().rstrip(".")
    try:
        return not is_public(name)
    except ValueError:
        pass
    try:
        return not is_public(socket.inet_ntoa(socket.inet_aton(name)))
    except (OSError, ValueError):  # ValueError: a NUL
        return name == "localhost" or name.endswith(".localhost")


def connect_public(address: tuple[str, int], *options) -> socket.socket:
    """As socket.create_connection, to a public address of the host only. Raises OSError "private address"."""
    host, port = address
    problem = None
    for *_, found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if not is_public(found[0]):
            problem = problem or refuse(found[0])
            continue
        try:
            return socket.create_connection(found[:2], *options)
        except OSError as error:
            problem = error
    raise problem or OSError("[Errno -5] No address associated with hostname")


def refuse(address: str) -> OSError:
    """The error of a fetch that would leave the public internet."""
    return OSError(f"private address {address}, which a list from the web must not reach")
