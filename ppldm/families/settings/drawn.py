"""How a model is drawn: what it keeps, stated once for all families that draw from captions."""

from dataclasses import dataclass
from functools import partial

from ...config.option import Bounds, option
from ...diffusion.drawing import KEPT, MOST_GUIDANCE, SAMPLERS, USUAL

_drawn = partial(option, section="validation")
_KEEPS = "by default, while training and afterwards; saved with it (default: that of the whole model it starts from"


@dataclass(kw_only=True)
class DrawnSettings:
    """A base of the settings of such families."""

    image_logging_steps: int = _drawn(
        1000, "Draw sample pictures every this many updates; 0: never.", bounds=Bounds(least=0), unit="updates"
    )
    guidance_scale: float | None = _drawn(
        None,
        f"Guidance scale that the model is drawn with {_KEEPS}, else {USUAL.guidance_scale}).",
        bounds=Bounds(least=0, most=MOST_GUIDANCE),
    )
    num_inference_steps: int | None = _drawn(
        None,
        f"Sampling steps that the model is drawn in {_KEEPS}, else {USUAL.num_inference_steps}).",
        bounds=Bounds(above=0),
        unit="steps",
    )
    sampler: str | None = _drawn(
        None, f"Sampler that the model is drawn by {_KEEPS}, else ddim, or flow-euler of flow).", choices=SAMPLERS
    )

    def kept(self) -> dict:
        """What is said of these, by the names of `Drawing`."""
        return {name: getattr(self, name) for name in KEPT if getattr(self, name) is not None}
