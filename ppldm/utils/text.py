"""Words for numbers of things."""

from collections.abc import Iterable


def count_of(number: int, thing: str) -> str:
    """`number` things: "1 list", "2 lists", "1,000 lists". `thing` takes a plain s."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def name_ranks(ranks: Iterable[int]) -> str:
    """ "rank 3", or "ranks 1, 3"."""
    numbers = sorted(ranks)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}"
