"""Named choices of emoji: what is drawn for training, and which names make up the picture grid afterwards.

The quickstart subset has shapes in many colours and some pictures that nothing else looks like. A few combinations of
colour and shape are held out: no picture of them is in the data, though both words are in other captions.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Subset:
    """`drawn`: emoji to train on, in the order that a limit counts. `prompts`: those of them whose captions go into the
    grid. `held_out`: emoji of which only the captions are used, as prompts never seen."""

    drawn: tuple[str, ...]
    prompts: tuple[str, ...]
    held_out: tuple[str, ...]


QUICKSTART = Subset(
    drawn=(
        *"🟠🟡🟢🔵🟤⚫⚪",
        *"🟥🟧🟦🟪🟫⬛⬜",
        *"❤💛💚💜🤎🖤🤍🩷🩶",
        *"🔶🔷🔺🔻",
        *"🍎🍏🍐🍊🍋🍓📗📘📙",
        *"☀⭐🌙☁🐱🐷😀😎🐸🐼",
        *"🌸🌻🌷☂🍀🍄🐟⛄🌲",
    ),
    prompts=tuple("❤🟧🟢💜⚫🍎⭐🌙🐱🌲"),
    held_out=tuple("💙🧡🟩🟨🔴🟣"),
)
