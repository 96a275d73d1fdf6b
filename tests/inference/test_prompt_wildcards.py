"""Choices in prompts: which there are, that they are drawn evenly and again, and words for bad lists."""

from collections import Counter

import pytest

from ppldm.inference.prompt_wildcards import Wildcards
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
