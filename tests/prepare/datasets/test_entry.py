"""The registry: every entry is whole."""

import json
import re
from datetime import date

import pytest

from ppldm.cli.main import run
from ppldm.prepare.datasets import entry as registry
from ppldm.prepare.datasets.entry import expand, find_entry, list_entries
from ppldm.utils.errors import ConfigError


def show(name: str, capsys) -> str:
    registry.show(name)
    return capsys.readouterr().out


@pytest.mark.parametrize("name", list_entries())
def test_an_entry_says_where_its_facts_come_from(name, capsys):
    entry = find_entry(name)
    assert date.fromisoformat(entry.checked) and entry.facts
    assert entry.unsure in show(name, capsys)
    assert entry.licence["name"] and entry.licence["page"].startswith("https://")
    for source in (*entry.pictures, *entry.captions):
        places = [source.hub] if source.hub else list(source.all)
        assert all(places) and isinstance(source.all, tuple) and isinstance(source.small, tuple)
        assert (
            set(expand(source.patterns("small")[0])) <= {n for p in source.all for n in expand(p)}
            or "*" in source.all[0]
        )
    assert bool(entry.captions) == bool(entry.query)
    assert bool(entry.withdrawn) == name.startswith("laion")


def test_the_list_has_every_name(capsys):
    for flags in ([], ["--json"]):
        run(["dataset", "list", *flags])
        told = capsys.readouterr().out
        assert all(name in told for name in list_entries())
    assert json.loads(told).keys() == list_entries().keys()


def test_ranges():
    assert expand("a{08..11}.tar") == ["a08.tar", "a09.tar", "a10.tar", "a11.tar"]
    assert expand("{1..2}/{001..002}") == ["1/001", "1/002", "2/001", "2/002"] and expand("a*.tar") == ["a*.tar"]
    sizes = {"cc12m": (2176, 23), "diffusiondb": (14000, 140), "journeydb": (200, 2)}
    for name, counts in sizes.items():
        (source,) = find_entry(name).pictures
        found = [[one for pattern in source.patterns(size) for one in expand(pattern)] for size in ("all", "small")]
        assert tuple(map(len, found)) == counts and set(found[1]) <= set(found[0])


def test_names():
    with pytest.raises(ConfigError, match="did you mean journeydb"):
        find_entry("jurneydb")
    with pytest.raises(ConfigError, match="for hf:OWNER/NAME"):
        find_entry("cc12m", columns={"image": "jpg"})
    some, whole = find_entry("journeydb", ["data/train/imgs/{007..008}.tgz"]), find_entry("journeydb")
    assert [some.pictures[0].patterns(size) for size in ("small", "all")] == [("data/train/imgs/{007..008}.tgz",)] * 2
    assert (some.captions, some.query, some.pictures[0].hub) == (whole.captions, whole.query, whole.pictures[0].hub)
    with pytest.raises(ConfigError, match="--files is not for sa1b"):
        find_entry("sa1b", ["a.tar"])
    entry = find_entry("hf:a/b.c", ["x/*.tar"], {"url": "link", "caption": ""})
    assert entry.pictures[0].all == ("x/*.tar",) and entry.pipeline["download"] == {"url_col": "link"}
    assert not re.search("token|secret", str(entry))
