"""Which pictures are drawn, under which names, and everything that decides each of them: its record."""

import itertools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ...diffusion.drawing import KEPT, Drawing
from ..prompts import Request, Wildcards

Job = tuple[tuple, int, int]  # (a value on each axis, number of the request, index)
SCALE = "guidance_scale"
AXES = ("seed", *(one.name for one in fields(Drawing)))  # what may differ between pictures of a prompt and index
LAYOUTS = ("", "geneval")
FILES = ("lora", "textual_inversion")  # what is laid over the weights
_GRID_NAMES = {"sigmas": "sigma_schedule", "steps": "num_inference_steps"}  # further ones, of `--grid`


@dataclass(frozen=True)
class Plan:
    """What is to be drawn: `num_samples` pictures of each request, for each value on each of the axes, settings by name
    (`AXES`); `drawing` has the others. seed: of requests that have none. height, width: None: as trained. control:
    uint8 [K, H, W]. first: the index of each request's first picture. place: (pictures of the batch, place there),
    where one is drawn again as it was in it. labelled: whether sheets show the axes. source: where the model came from.
    image: uint8 [3, H, W] to draw over; mask: bool [H, W], True where it is drawn anew. layout: of
    LAYOUTS; geneval's is 00000/samples/00000.png, …, as its diffusers_generate.py has it (arXiv:2310.11513)."""

    requests: list[Request]
    num_samples: int
    axes: Mapping[str, list]
    drawing: Drawing
    seed: int
    height: int | None
    width: int | None
    exact: bool
    control: Any = None
    control_scale: float = 1.0
    weighted: bool = False
    wildcards: Wildcards | None = None
    first: int = 0
    place: tuple[int, int] | None = None
    labelled: bool = False
    source: Mapping = field(default_factory=dict)
    image: Any = None
    mask: Any = None
    layout: str = ""

    def jobs(self) -> list[Job]:
        """One for each picture."""
        indices = range(self.first, self.first + self.num_samples)
        return list(itertools.product(itertools.product(*self.axes.values()), range(len(self.requests)), indices))

    def file(self, values: tuple, number: int, index: int) -> str:
        """A picture's path in the output folder."""
        if self.layout:
            return f"{self.folder(values)}{number:05d}/samples/{index:05d}.png"
        return f"{self.folder(values)}{self.number(number)}-{index:02d}.png"

    @property
    def pattern(self) -> str:
        """Of all such files in the folder of one."""
        return f"{'[0-9]' * 5}.png" if self.layout else "*-[0-9][0-9].png"

    def number(self, number: int) -> str:
        """That of a request, as files have it."""
        return f"{number:0{max(3, len(str(len(self.requests) - 1)))}d}"

    def folder(self, values: tuple) -> str:
        """That of all pictures of these values; "" where there are no others."""
        if all(len(one) == 1 for one in self.axes.values()):
            return ""
        if list(self.axes) == [SCALE]:
            return f"g{short(values[0])}/"
        return ",".join(f"{name}={short(value)}" for name, value in zip(self.axes, values, strict=True)) + "/"

    def size(self, resolution: int) -> tuple[int, int]:
        """(height, width) for a model that was trained at `resolution`."""
        height, width = (resolution if side is None else side for side in (self.height, self.width))
        return height, width

    def drawing_at(self, values: tuple) -> Drawing:
        """How pictures of these values are drawn."""
        found = dict(zip(self.axes, values, strict=True))
        found.pop("seed", None)
        return replace(self.drawing, **found)

    def fit(self, model) -> "Plan":
        """The same with what the model is drawn with by default. Raises ConfigError."""
        told = model.process, model.usual
        axes = {
            name: [getattr(replace(self.drawing, **{name: one}).fit(*told), name) for one in values]
            if name in KEPT
            else values
            for name, values in self.axes.items()
        }
        fitted = replace(self, axes=axes, drawing=self.drawing.fit(*told))
        for values in itertools.product(*axes.values()):
            fitted.drawing_at(values).fit(*told)
        return fitted

    def seed_of(self, values: tuple, number: int) -> int:
        """That of an axis, or else of the request, or of all."""
        own = self.requests[number].seed
        return dict(zip(self.axes, values, strict=True)).get("seed", self.seed if own is None else own)

    def digests(self) -> dict[str, str]:
        """What tells control image, image and mask apart in records; of those that are there."""
        given = {name: getattr(self, name) for name in ("control", "image", "mask")}
        return {name: f"{zlib.crc32(one.tobytes()):08x}" for name, one in given.items() if one is not None}

    def records(self, pipeline) -> dict[Job, dict]:
        """Everything that decides each picture."""
        return {job: self._record(pipeline, *job) for job in self.jobs()}

    def _record(self, pipeline, values: tuple, number: int, index: int) -> dict:
        request, seed = self.requests[number], self.seed_of(values, number)
        height, width = self.size(pipeline.resolution)
        led: dict = self.digests()
        if self.control is not None:
            led["control_scale"] = self.control_scale
        said = {"prompt": request.prompt, "negative_prompt": request.negative_prompt}
        if self.wildcards:
            said = {name: self.wildcards.resolve(text, seed, index) for name, text in said.items()}
        return led | {
            **said,
            **({"template": request.prompt} if said["prompt"] != request.prompt else {}),
            **({"prompt_syntax": "weighted"} if self.weighted else {}),
            "index": index,
            "seed": seed,
            **self.drawing_at(values).as_dict(),
            "height": height,
            "width": width,
            "weights": pipeline.fingerprint,
            "exact": self.exact,
            **pipeline.computed,
            **{name: files for name in FILES if (files := getattr(pipeline, name))},
        }


def axis_of(word: str) -> str:
    """The setting that a word of `--grid` names, in words of `AXES`."""
    name = word.partition("=")[0].replace("-", "_")
    return _GRID_NAMES.get(name, name)


def flag_of(name: str) -> str:
    """The flag that says a setting."""
    return "--sigmas" if name == "sigma_schedule" else f"--{name.replace('_', '-')}"


def short(value) -> str:
    """A number as a person writes it, an interval as LOW..HIGH, and other values as they are; two that differ have
    different texts."""
    if isinstance(value, tuple):
        return "..".join(map(short, value))
    if not isinstance(value, float):
        return str(value)
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)
