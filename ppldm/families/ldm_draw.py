"""The sample pictures of a latent diffusion model that is trained."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import paddle

from ..data.control import to_picture
from ..data.shapes import nearest_to_square
from ..diffusion.guided import draw, noises, sample_latents, to_pictures
from ..utils.log import progress
from ..utils.pictures import pad_alike, prompt_grid, titled_rows
from ..utils.processes.ranks import gather_in_order, gather_objects, shard
from .base import Sitting

NUM_PICTURES = 8  # of the batch, as published, or at a time
ROWS = ("original", "reconstruction", "noised", "predicted")  # of the batch's pictures


def draw_sample_pictures(sitting: Sitting) -> dict:
    """Pictures by tag on the main process: originals, where all are there, over their reconstructions and, with
    --draw_predictions, what the loss is shown of them and what is predicted by that; and samples of each scale, beside
    control images where there are some. Samples are of the prompts, from the noise of (seed, prompt), with buckets in
    the shape nearest to a square; without any, of the first NUM_PICTURES captions and noises of the batches. The ranks
    share the work; a collective call."""
    world, prompts, tokenizer = sitting.world, sitting.prompts, sitting.model.tokenizer
    own = {name: sitting.batch[name][: len(shard(NUM_PICTURES, world))] for name in ("input_ids", "noise")}
    my_prompts = [prompts[number] for number in shard(len(prompts), world)]
    captions = my_prompts if prompts else tokenizer.decode(own["input_ids"].numpy())
    gathered = gather_objects({"captions": captions} | _draw_own(sitting, own, my_prompts), world)
    if not world.is_main:
        return {}
    drawn = {tag: gather_in_order([one[tag] for one in gathered]) for tag in gathered[0]}
    captions, columns = drawn.pop("captions"), drawn.pop("reconstruction")
    rows = dict(zip(ROWS, map(list, zip(*columns, strict=True)), strict=False))
    rows = {name: row for name, row in rows.items() if not any(one is None for one in row)}
    leads = drawn.pop("control", ())
    samples = {}
    for tag, row in drawn.items():
        alike = pad_alike([*leads, *row])
        cells = [[*one] for one in zip(alike[: len(row)], alike[len(row) :], strict=True)] if leads else alike[:, None]
        samples[tag] = prompt_grid(captions, cells, columns=NUM_PICTURES // (2 if leads else 1))
    return samples | {"reconstruction": titled_rows(rows)}


def _draw_own(sitting: Sitting, own: dict, my_prompts: list[str]) -> dict:
    """This rank's pictures by tag; of reconstructions those of `ROWS` for each sample."""
    model, tokenizer = sitting.model, sitting.model.tokenizer
    drawings = (replace(model.usual, guidance_scale=scale).fit(model.process) for scale in sitting.guidance_scales)
    tagged = {f"{one.sampler}-samples-{one.guidance_scale}": one for one in drawings}
    shape, empty = tuple(sitting.batch["noise"].shape[1:]), paddle.to_tensor(tokenizer.encode([""]))
    controls = sitting.batch.get(model.led_by)
    if (buckets := sitting.dataset.selection.buckets) and controls is None:
        shape = model.inputs["noise"].shape(*nearest_to_square(buckets.shapes))
    chunks = [my_prompts[start : start + NUM_PICTURES] for start in range(0, len(my_prompts), NUM_PICTURES)]
    bar = progress(
        total=sum(drawing.num_passes() for drawing in tagged.values()) * (len(chunks) if sitting.prompts else 1),
        desc="drawing samples",
        unit="step",
        delay=5,
        disable=not sitting.world.is_main,
    )
    found: dict[str, list] = {"reconstruction": []} | {tag: [] for tag in tagged}
    if controls is not None:
        count = len(my_prompts) if sitting.prompts else len(own["noise"])
        controls = controls[[number % len(controls) for number in range(count)]] if count else controls[:0]
        found["control"] = [to_picture(one) for one in controls.numpy()]
    with bar:
        settings = {"callback": lambda *_: bar.update()}
        drawn = partial(draw, model, tokenizer, shape=shape, seed=sitting.seed, check=False, **settings)
        if len(own["noise"]):
            found["reconstruction"] = _reconstruct(model, sitting.batch, len(own["noise"]))
            if sitting.config.draw_predictions:
                predicted = _predict(model, sitting.batch, len(own["noise"]))
                columns = zip(found["reconstruction"], predicted, strict=True)
                found["reconstruction"] = [(*made, *shown) for made, shown in columns]
        for tag, drawing in tagged.items():
            for number, chunk in enumerate(chunks):
                led = _led(model, controls, number * NUM_PICTURES, len(chunk))
                found[tag] += list(drawn(prompts=chunk, indices=[0] * len(chunk), drawing=drawing, control=led))
            if not sitting.prompts and len(own["noise"]):
                led = _led(model, controls, 0, len(own["noise"]))
                latents = sample_latents(
                    model,
                    model.condition(own["input_ids"]),
                    model.condition(empty),
                    own["noise"],
                    drawing,
                    **settings,
                    control=led,
                    next_noise=_noise_of(sitting, own),
                )
                found[tag] += list(to_pictures(model.decode(latents)))
    return found


def _noise_of(sitting: Sitting, own: dict) -> Callable:
    """What gives a stochastic sampler the noise of each step, of the batch's own captions."""
    shape, texts = tuple(own["noise"].shape[1:]), sitting.model.tokenizer.decode(own["input_ids"].numpy())
    streams = [noises(sitting.seed, text, place, shape) for place, text in enumerate(texts)]
    return lambda: paddle.to_tensor(np.stack([next(stream) for stream in streams]))


def _led(model, controls, start: int, count: int) -> dict | None:
    return None if controls is None else model.lead(controls[start : start + count])


def _reconstruct(model, batch: dict, count: int) -> list[tuple]:
    """(original, None without pixels; decoded) of the first samples of a batch."""
    if "moments" not in batch:
        batch = {name: batch[name][:count] for name in ("pixel_values", "posterior_noise") if name in batch}
    given = {name: batch[name] for name in ("posterior_noise", "pixel_values", "moments", "uncached") if name in batch}
    decoded = to_pictures(model.decode(model.latents(**given)[:count]))
    pixels = batch["pixel_values"].transpose([0, 2, 3, 1]).numpy() if "pixel_values" in batch else ()
    places = batch["uncached"][:, 0].tolist() if "uncached" in batch else [*range(len(pixels))]
    originals = dict(zip(places, pixels[places] if len(pixels) > len(places) else pixels, strict=True))
    return [(originals.get(number), picture) for number, picture in enumerate(decoded)]


def _predict(model, batch: dict, count: int) -> list[tuple]:
    """(x_t, the x_0 that is predicted by it) of the first samples of a batch, at their own noise levels, decoded."""
    model.watched = watched = []
    try:
        model.loss(batch)
    finally:
        model.watched = None
    return list(zip(*(to_pictures(model.decode(one[:count])) for one in watched[0]), strict=True))
