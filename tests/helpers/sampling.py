"""A share of the tests, for a machine or a Python that has no time for all.

`pytest --sample 0.5 --sample-seed 7` plays half of them; `--sample-cases 0.5`, of each slow test with several cases,
half of these, at least one.
"""

import hashlib
import math

from quick import mark_quick


def pytest_addoption(parser):
    parser.addoption("--sample", type=float, default=1.0, help="run this share of the tests, chosen by --sample-seed")
    parser.addoption(
        "--sample-cases", type=float, default=1.0, help="run this share of the cases of each slow test, at least one"
    )
    parser.addoption("--sample-seed", type=int, default=0, help="another number chooses other tests")


def pytest_collection_modifyitems(config, items):
    mark_quick(items)
    share, of_cases, seed = (config.getoption(f"--sample{name}") for name in ("", "-cases", "-seed"))
    names = [item.nodeid for item in items if item.get_closest_marker("slow")]
    left_out = set(names) - chosen_cases(names, of_cases, seed)
    left_out |= {item.nodeid for item in items if not chosen(item.nodeid, share, seed)}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_report_header(config):
    share, of_cases, seed = (config.getoption(f"--sample{name}") for name in ("", "-cases", "-seed"))
    if share >= 1 and of_cases >= 1:
        return []
    return [f"a sample: --sample {share} --sample-cases {of_cases} --sample-seed {seed}"]


def chosen(name: str, share: float, seed: int) -> bool:
    """True for a share of all names, another one for each seed."""
    return _draw(name, seed) < share


def chosen_cases(names: list[str], share: float, seed: int) -> set[str]:
    """Of the names of each test this share, rounded up, another one for each seed."""
    by_test: dict[str, list[str]] = {}
    for name in names:
        by_test.setdefault(name.partition("[")[0], []).append(name)
    return {
        name
        for cases in by_test.values()
        for name in sorted(cases, key=lambda name: _draw(name, seed))[: math.ceil(share * len(cases))]
    }


def _draw(name: str, seed: int) -> float:
    drawn = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(drawn[:4], "big") / 2**32
