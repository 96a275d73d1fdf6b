"""Choices in prompts: which there are, that they are drawn evenly and again, and words for bad lists."""

import os
from collections import Counter

import pytest

from ppldm.inference.prompts import Wildcards
from ppldm.utils.errors import ConfigError


@pytest.fixture
def lists(tmp_path):
    (tmp_path / "colours").mkdir()
    (tmp_path / "colours" / "warm.txt").write_text("# a remark\nred\n\n  {dark|light} orange \n", encoding="utf-8")
    (tmp_path / "thing.txt").write_text("\ufeff红心\r\na __colours/warm__ boat\r\n", encoding="utf-8")
    return tmp_path


def test_every_choice_is_drawn_as_often_as_it_is_due(lists):
    wildcards = Wildcards(lists)
    text = "{one|two} __thing__"
    wildcards.check(text)
    drawn = Counter(wildcards.resolve(text, 5, index) for index in range(4000))
    due = {"红心": 1 / 4, "a red boat": 1 / 8, "a dark orange boat": 1 / 16, "a light orange boat": 1 / 16}
    assert set(drawn) == {f"{count} {thing}" for count in ("one", "two") for thing in due}
    for thing, share in due.items():
        for count in ("one", "two"):
            assert abs(drawn[f"{count} {thing}"] - 4000 * share) < 5 * (4000 * share * (1 - share)) ** 0.5


def test_the_choice_is_a_function_of_seed_prompt_and_index(lists):
    text = "{a|b|c|d|e|f|g|h} __thing__"
    one, other = ([Wildcards(lists).resolve(text, seed, i) for i in range(20)] for seed in (3, 4))
    assert one == [Wildcards(lists).resolve(text, 3, i) for i in range(20)] != other
    wildcards = Wildcards(lists)
    assert [wildcards.resolve(text, 3, i) for i in reversed(range(20))] == one[::-1]
    assert wildcards.resolve("snake_case __ and_ \\{x|y\\}", 0, 0) == "snake_case __ and_ {x|y}"


@pytest.mark.parametrize(
    "text, files, message",
    [
        ("__thin__", {}, "__thin__: cannot read .*thin.txt .No such file or directory.; did you mean thing?"),
        ("a __../secret__", {}, None),  # not a name, so left alone
        ("__empty__", {"empty.txt": "\n# nothing\n"}, "empty.txt holds no choices; write one a line"),
        ("__odd__", {"odd.txt": b"\xff\xfe"}, "odd.txt is not UTF-8 text"),
        ("__a__", {"a.txt": "x\n{y|__b__}", "b.txt": "__a__"}, "a -> b -> a is a circle"),
        ("__a__", {"a.txt": "__c__"}, "__c__: cannot read"),
    ],
)
def test_words_for_bad_lists(lists, text, files, message):
    for name, content in files.items():
        (lists / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    wildcards = Wildcards(lists)
    if message is None:
        wildcards.check(text)
        assert wildcards.resolve(text, 0, 0) == text
        return
    with pytest.raises(ConfigError, match=message):
        wildcards.check(text)
    with pytest.raises(ConfigError, match="there is no such folder; give one with a text file for each list"):
        Wildcards(lists / "nowhere")


def write_lists(folder, lists) -> Wildcards:
    for name, lines in lists.items():
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return Wildcards(folder)


def test_each_list_is_looked_at_once(tmp_path, monkeypatch):
    """Three levels of 300 lines that all name the next; and a ladder of lists that name both of the next."""
    levels = {f"l{level}": [f"{line} __l{level + 1}__" for line in range(300)] for level in range(3)} | {"l3": ["x"]}
    ladder = {f"{side}{n}": [f"__a{n + 1}__", f"__b{n + 1}__"] for n in range(60) for side in "ab"}
    wildcards = write_lists(tmp_path, levels | ladder | {"a60": ["x"], "b60": ["y"]})
    looked, check = [], Wildcards.check
    monkeypatch.setattr(Wildcards, "check", lambda *given: looked.append(given) or check(*given))
    wildcards.check("__l0__ __a0__ __b0__")
    wildcards.check("__l0__ __a0__")
    assert len(looked) == 2 + 4 + 122
    assert wildcards.resolve("__a0__", 1, 2) in "xy" and wildcards.resolve("__l0__", 1, 2).endswith(" x")


@pytest.mark.parametrize("last", ["word", "{|}", "__x__"])
@pytest.mark.parametrize("text", ["__d0__", "a {__d0__|__d1__}"])
def test_a_prompt_that_grows_without_bound_is_refused(last, text, tmp_path):
    doubled = {f"d{number}": [f"__d{number + 1}__ __d{number + 1}__"] for number in range(40)}
    wildcards = write_lists(tmp_path, doubled | {"d40": [last], "x": ["x"]})
    wildcards.check(text)
    with pytest.raises(ConfigError, match="come to more than 100,000 letters; name fewer lists"):
        wildcards.resolve(text, 1, 2)


@pytest.mark.parametrize("backwards", [False, True])
def test_a_chain_of_lists_ends_in_a_word_or_is_refused(backwards, tmp_path):
    """In whichever order its lists are looked at, and however many prompts begin in its middle."""
    chain = {f"c{number}": [f"__c{number + 1}__"] for number in range(3000)} | {"c3000": ["end"]}
    wildcards = write_lists(tmp_path, chain)
    for start in range(3000, 2900, -1) if backwards else (2901,):
        wildcards.check(f"__c{start}__")
    assert wildcards.resolve("__c2901__", 1, 2) == "end"
    for start in (2900, 2000, 0):
        with pytest.raises(ConfigError, match="more than 100 lists lead to one another"):
            wildcards.check(f"__c{start}__")


def test_a_list_that_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    (tmp_path / "folder.txt").mkdir()
    for name in ("pipe", "zero", "folder"):
        with pytest.raises(ConfigError, match=f"__{name}__: .* is not a file"):
            Wildcards(tmp_path).check(f"__{name}__")
