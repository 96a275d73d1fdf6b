"""Pictures that a model draws to be evaluated: which prompts, and one plan of `ppldm generate` a guidance scale.

So drawing is shared out over ranks, and goes on where it stopped, as there. Which prompts are drawn of many is the same
for every seed, so that a seed changes only the noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..diffusion.drawing import Drawing
from ..inference.pictures.draw import draw_plan
from ..inference.pictures.plan import SCALE, Plan, short
from ..inference.prompts import Request, read_requests
from ..utils.errors import ConfigError, DataError
from ..utils.rng import Stream, make_rng

USUAL_SAMPLES = 1000  # where nobody says how many, and there are as many prompts
_CHOICE = 0  # the seed that chooses prompts, and real pictures


@dataclass(frozen=True)
class Samples:
    """What is drawn, whatever the model. per_prompt: pictures of each request; drawing: at any guidance scale."""

    requests: list[Request]
    per_prompt: int
    guidance_scales: tuple[float, ...]
    drawing: Drawing
    seed: int
    resolution: int | None
    exact: bool
    batch_size: int

    @property
    def count(self) -> int:
        """Pictures at each guidance scale."""
        return len(self.requests) * self.per_prompt

    def plan(self, scale: float) -> Plan:
        """The pictures of one guidance scale."""
        return Plan(self.requests, self.per_prompt, {SCALE: [scale]}, self.drawing, self.seed, self.resolution,
                    self.resolution, self.exact)  # fmt: skip

    def folders(self, out: Path) -> dict[float, Path]:
        """Where the pictures of each guidance scale go."""
        return {scale: out / f"g{short(scale)}" for scale in self.guidance_scales}

    def settings(self) -> dict:
        """All that decides the pictures of one guidance scale besides the weights and the scale."""
        return {
            "requests": [[one.prompt, one.negative_prompt, one.seed] for one in self.requests],
            "per_prompt": self.per_prompt,
            **at_any_scale(self.drawing),
            "seed": self.seed,
            "resolution": self.resolution,
            "exact": self.exact,
        }

    def draw(self, pipeline, out: Path, world) -> None:
        """Draw this rank's share of what is not there yet. Raises OutputError, ConfigError."""
        for scale, folder in self.folders(out).items():
            draw_plan(pipeline, self.plan(scale), folder, batch_size=self.batch_size, world=world)


def at_any_scale(drawing: Drawing) -> dict:
    """All that a drawing says but its guidance scale, JSON-ready."""
    return {name: value for name, value in drawing.as_dict().items() if name != "guidance_scale"}


def choose_requests(
    prompts_file: str | None, captions: Sequence[str | None], where: str, num_samples: int | None, negative_prompt: str
) -> tuple[list[Request], int]:
    """(requests, pictures of each), of a file of prompts, or of the captions of the pictures at `where`.

    Raises ConfigError for numbers that do not go together, DataError where captions are missing.
    """
    if prompts_file:
        requests = read_requests(prompts_file)
    else:
        if missing := sum(not caption for caption in captions):
            raise DataError(
                f"{missing} of {len(captions)} pictures of {where} have no caption to draw from; give --prompts FILE"
            )
        requests = [Request(caption) for caption in captions]
    requests = [Request(r.prompt, r.negative_prompt or negative_prompt, r.seed, r.remark) for r in requests]
    wanted = min(len(requests), USUAL_SAMPLES) if num_samples is None else num_samples
    if wanted > len(requests) and wanted % len(requests):
        raise ConfigError(
            f"--num-samples {wanted} is not a multiple of the {len(requests)} prompts; give "
            f"{wanted // len(requests) * len(requests)}, or at most {len(requests)}"
        )
    if wanted >= len(requests):
        return requests, wanted // len(requests)
    chosen = make_rng(_CHOICE, Stream.ORDER).permutation(len(requests))[:wanted]
    return [requests[number] for number in sorted(chosen.tolist())], 1
