"""The guidance scale that a model keeps, stated once for all families that draw from captions."""

from ...config.option import Bounds, option
from ...diffusion.drawing import MOST_GUIDANCE, USUAL_GUIDANCE


def guidance_option() -> float | None:
    """The option `guidance_scale` of a group of settings."""
    return option(
        None,
        f"Guidance scale that the model is drawn with by default, saved with it (default: that of the whole model it "
        f"starts from, else {USUAL_GUIDANCE}).",
        bounds=Bounds(least=0, most=MOST_GUIDANCE),
        section="validation",
    )
