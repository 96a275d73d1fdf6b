"""Laws of tags: a pure draw; the head and the tail stay; shuffling loses nothing; each tag is dropped as often."""

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from ppldm.data.text.captions import TagRule
from ppldm.utils.rng import make_rng

TAGS = st.lists(st.text("abcü一 ", min_size=1, max_size=6).map(str.strip).filter(bool), max_size=12)
ROWS = st.integers(0, 1 << 40)


def generator(row, seed=3):
    return partial(make_rng, seed, epoch=1, row=row)


def cut(caption, separator=","):
    return [tag.strip() for tag in caption.split(separator) if tag.strip()]


@given(TAGS, ROWS, st.integers(0, 5), st.sampled_from([",", ";", " / ", "|||"]))
def test_shuffling_keeps_the_head_and_every_tag(tags, row, keep, separator):
    rule = TagRule(shuffle=True, keep=keep, separator=separator)
    shuffled = cut(rule.apply(separator.join(tags), generator(row)), separator)
    assert shuffled[:keep] == tags[:keep] and sorted(shuffled) == sorted(tags)
    assert rule.apply(separator.join(tags), generator(row)) == rule.apply(separator.join(tags), generator(row))


@given(TAGS, ROWS, st.integers(0, 5), st.sampled_from([0.0, 0.3, 1.0]))
def test_dropping_keeps_the_head_and_the_order(tags, row, keep, probability):
    left = cut(TagRule(drop_probability=probability, keep=keep).apply(",".join(tags), generator(row)))
    assert left[:keep] == tags[:keep]
    behind = iter(tags[keep:])
    assert all(tag in behind for tag in left[keep:])
    if probability in (0, 1):
        assert left[keep:] == ([] if probability else tags[keep:])


def test_all_orders_and_all_tags_come_alike_often():
    rule = TagRule(shuffle=True)
    orders = [rule.apply("a, b, c", generator(row)) for row in range(3000)]
    counts = {order: orders.count(order) for order in set(orders)}
    assert len(counts) == 6 and all(400 < count < 600 for count in counts.values())
    dropped = [TagRule(drop_probability=0.2).apply("a, b, c", generator(row)) for row in range(3000)]
    assert all(2250 < sum(tag in caption for caption in dropped) < 2550 for tag in "abc")


def test_which_tags_are_dropped_does_not_depend_on_shuffling():
    for row in range(50):
        plain, shuffled = (TagRule(shuffle, 0.5).apply("a, b, c, d, e", generator(row)) for shuffle in (False, True))
        assert sorted(cut(plain)) == sorted(cut(shuffled))


def test_separators_of_their_own():
    rule = TagRule(shuffle=True, keep=3, keep_separator="|||", group_separator=";;")
    found = {rule.apply("a, b ||| c;;d, e, f ||| z", generator(row)) for row in range(100)}
    assert all(one.startswith("a, b, ") and one.endswith(", z") and "c, d" in one for one in found)
    assert len(found) == 6
    assert rule.apply("a, b, c ,d", generator(1)) == "a, b, c, d"
    assert TagRule(True, 1.0, keep_separator="|||").apply("a ||| b", generator(1)) == "a"


def test_dropping_and_shuffling_have_numbers_of_their_own():
    """Else those that are dropped would be those that come first."""
    kept = [set(cut(TagRule(True, 0.5).apply("a, b, c, d", generator(row)))) for row in range(200)]
    first = [cut(TagRule(True).apply("a, b, c, d", generator(row)))[0] for row in range(200)]
    assert 60 < sum(one in tags for one, tags in zip(first, kept, strict=True)) < 140
