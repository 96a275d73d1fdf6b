"""Whatever huggingface_hub and aistudio-sdk have dropped, ppdiffusers and paddlenlp find what they import of them."""

import ast
import importlib
import importlib.util
from pathlib import Path

import huggingface_hub
import pytest
import requests

from ppldm.utils.errors import EnvironmentProblem
from ppldm.utils.machine import hub_names

NAMES = [(place, name) for _, place, names in hub_names._NAMES for name in names]
HUBS = ("huggingface_hub", "aistudio_sdk")
# What a newer version was seen to lack of what the two packages import.
LACKED = {
    "huggingface_hub 0.36.2": {"cached_download"},
    "huggingface_hub 1.33.0": {"HfFolder", "cached_download", "hf_cache_home", "_request_wrapper"},
    "huggingface_hub 2.4.0": {
        *("HfFolder", "cached_download", "repo_type_and_id_from_hf_id", "hf_cache_home", "_request_wrapper")
    },
    "aistudio-sdk 0.3.9": {"download"},
}


def imported() -> set[tuple[str, str]]:
    """(module, name) of each `from huggingface_hub… import name` in the two packages."""
    found = set()
    for package in ("paddlenlp", "ppdiffusers"):
        for path in Path(importlib.util.find_spec(package).submodule_search_locations[0]).rglob("*.py"):
            text = path.read_text(encoding="utf-8", errors="replace")
            for node in ast.walk(ast.parse(text)) if any(f"from {hub}" in text for hub in HUBS) else ():
                if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in HUBS:
                    found |= {(node.module, one.name) for one in node.names}
    return found


def have() -> dict[tuple[str, str], object]:
    """{(module, name): value} of those that are there of what may be missing."""
    places = {place: importlib.import_module(place) for place, _ in NAMES}
    return {(place, name): getattr(places[place], name) for place, name in NAMES if hasattr(places[place], name)}


def take(patch, place: str, name: str):
    """The module, without the name: neither as its own nor as one that it imports when it is asked for."""
    module = importlib.import_module(place)
    lazy = vars(module).get("__getattr__")

    def get(asked):
        if asked == name or lazy is None:
            raise AttributeError(asked)
        return lazy(asked)

    patch.setattr(module, "__getattr__", get, raising=False)
    patch.setitem(vars(module), name, None)  # which puts back what there was
    del vars(module)[name]
    return module


def test_all_that_the_two_packages_import_is_there():
    hub_names.provide()
    wanted = imported()
    assert set(NAMES) <= wanted and len(wanted) > 30  # none is provided that nobody asks for
    assert {name for _, name in NAMES} == set().union(*LACKED.values())
    for place, name in sorted(wanted):
        module = importlib.import_module(place)
        assert hasattr(module, name) or importlib.util.find_spec(f"{place}.{name}"), (place, name)


@pytest.mark.parametrize(("place", "name"), NAMES)
def test_what_is_there_stays_and_what_is_missing_comes(monkeypatch, place, name):
    hub_names.provide()
    before = have()
    assert set(before) == set(NAMES)
    module = take(monkeypatch, place, name)
    assert set(have()) == set(NAMES) - {(place, name)}
    hub_names.provide()
    own = have().pop((place, name))
    assert all(have()[key] is value for key, value in before.items() if key != (place, name))
    if name == "HfFolder":
        monkeypatch.setenv("HF_TOKEN", "mine")
        assert own.get_token() == "mine"
    elif name == "hf_cache_home":
        assert own == module.HF_HOME
    else:
        with pytest.raises(EnvironmentProblem, match=rf"^\S+ \d\S+ has no {place}\.{name}; .*lock\.txt$"):
            own("https://here", method="HEAD")


def test_errors_of_the_network_are_those_of_the_library_that_the_hub_uses(monkeypatch):
    assert issubclass(requests.ConnectionError, hub_names.network_errors())
    with pytest.raises(hub_names.network_errors()):
        huggingface_hub.HfApi(endpoint="http://127.0.0.1:9").model_info("owner/model", timeout=2)
    monkeypatch.setitem(hub_names.sys.modules, "httpx2", type("httpx2", (), {"HTTPError": KeyError}))
    assert issubclass(KeyError, hub_names.network_errors())
    assert not {ValueError, OSError} & set(hub_names.network_errors())
