"""Ports for servers that begin later. The system gives none of these to a connection meanwhile."""

import random
import socket
from contextlib import suppress

FIRST, END = 20000, 32768  # below the ports of /proc/sys/net/ipv4/ip_local_port_range


def free_port() -> int:
    while True:
        port = random.SystemRandom().randrange(FIRST, END)
        with suppress(OSError), socket.create_server(("", port)):
            return port
