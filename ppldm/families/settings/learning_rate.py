"""The learning rate of one component: settings of families."""

from ...config.option import Bounds, Needs, option


def learning_rate_of(what: str, needs: Needs | None = None):
    """The option `<component>_learning_rate`; None is that of all (`--learning_rate`)."""
    return option(
        None,
        f"Learning rate of {what} (default: --learning_rate).",
        section="optimizer",
        bounds=Bounds(above=0),
        identity=True,
        needs=needs,
    )
