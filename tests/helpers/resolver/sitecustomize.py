"""Put first on PYTHONPATH, it makes a process resolve names without the network, and badly.

Names under `.test` are this machine, `.invalid` has no address, and `FAIL_LOOKUPS` is the share of look-ups that fail,
with the code `FAIL_CODE` of getaddrinfo.
"""

import os
import random
import socket

_getaddrinfo = socket.getaddrinfo
_random = random.Random(os.getpid())


def getaddrinfo(host, *args, **kwargs):
    if host is None or not host.endswith((".test", ".invalid")):
        return _getaddrinfo(host, *args, **kwargs)
    if host.endswith(".invalid"):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    if _random.random() < float(os.environ.get("FAIL_LOOKUPS", 0)):
        raise socket.gaierror(int(os.environ.get("FAIL_CODE", socket.EAI_AGAIN)), "as the test asks")
    return _getaddrinfo("127.0.0.1", *args, **kwargs)


socket.getaddrinfo = getaddrinfo
