"""By what pictures are led: settings of families that train a control network."""

from dataclasses import dataclass
from functools import partial

from ...config.option import option

_model = partial(option, section="model")


@dataclass(kw_only=True)
class ControlSettings:
    """A base of their settings."""

    control: str = _model(
        "canny",
        "Control images: canny, edges, grey, blur, tiles, super-resolution or inpainting, made of the pictures; row, "
        "the rows' second images; or a class of one's own, package.module:Class. Parameters follow with commas: "
        "canny,low=50,high=150 (docs/controlnet.md).",
        identity=True,
    )
