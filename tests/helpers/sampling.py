"""`pytest --sample 0.5 --sample-seed 7`: a share of the tests, for a machine or a Python that has no time for all."""

import hashlib


def pytest_addoption(parser):
    parser.addoption("--sample", type=float, default=1.0, help="run this share of the tests, chosen by --sample-seed")
    parser.addoption("--sample-seed", type=int, default=0, help="another number chooses other tests")


def pytest_collection_modifyitems(config, items):
    share, seed = config.getoption("--sample"), config.getoption("--sample-seed")
    taken = [item for item in items if chosen(item.nodeid, share, seed)]
    if len(taken) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if not chosen(item.nodeid, share, seed)])
        items[:] = taken


def pytest_report_header(config):
    share, seed = config.getoption("--sample"), config.getoption("--sample-seed")
    return [] if share >= 1 else [f"a sample: --sample {share} --sample-seed {seed}"]


def chosen(name: str, share: float, seed: int) -> bool:
    """True for a share of all names, another one for each seed."""
    drawn = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(drawn[:4], "big") < share * 2**32
