"""Make the autoencoder that lies in the package:  python benchmarks/packaged_autoencoder.py --out DIR

Preset `autoencoder-tiny-cpu` trains it on small pictures that are made here: OpenMoji's drawings (CC BY-SA 4.0), those
of the quickstart more often than others, whole and in pieces; and scenes of shapes that cover one another, with
gradients and textures, as photographs have them. DIR/run is the training, DIR/decoder a further one of the decoder
alone; both go on where they were stopped. At their end ppldm/config/weights/vae_tiny is written, and the PSNR of
pictures that it has not seen is printed.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter
from results import add_result_flags, save_results

from ppldm.config.recipe import RECIPE_FILE
from ppldm.demo.openmoji import QUICKSTART, read_catalog, render
from ppldm.prepare.convert.convert import convert_source
from ppldm.utils.stages import Stage, run_stage, train_command
from ppldm.weights.components import cast
from ppldm.weights.fetch import PACKAGED
from ppldm.weights.formats.files import read_component_arrays, write_safetensors

SIDE, HELD_OUT = 48, 64
WHOLE, PIECES, SCENES = 1200, 500, 1600  # pictures of each kind
COPIES = 8  # of each drawing of the quickstart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures and the training")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--decoder-steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--photographs", nargs="*", default=[], help="measured too, in pieces")
    parser.add_argument("--measure-only", action="store_true", help="measure the package's own as it is; make nothing")
    add_result_flags(parser, "packaged_autoencoder")
    arguments = parser.parse_args()
    if not arguments.measure_only:
        make(arguments)
    found = {name: round(measure(pictures), 1) for name, pictures in held_out(arguments.photographs).items()}
    print("".join(f"{name:>12}: {psnr} dB\n" for name, psnr in found.items()), end="")
    save_results(arguments, {"psnr_db": found})


def make(arguments) -> None:
    """Draw the pictures, train, and write the package's folder."""
    out = arguments.out
    if not (out / "manifest.json").exists():
        (out / "pictures").mkdir(parents=True, exist_ok=True)
        for number, picture in enumerate(draw_pictures(np.random.default_rng(0))):
            picture.save(out / f"pictures/{number:05d}.png")
            (out / f"pictures/{number:05d}.txt").write_text("a picture\n")
        convert_source(out / "pictures", out, name="pictures", num_workers=1)
    words = {"file_list": out / "pictures.filelist.list", "save_steps": 500,
             "per_device_train_batch_size": arguments.batch}  # fmt: skip
    further = {"vae_name_or_path": out / "run/vae", "train_decoder_only": True, "learning_rate": 1e-3,
               "warmup_steps": 20, "image_logging_steps": 0}  # fmt: skip
    for name, steps, more in (("run", arguments.steps, {}), ("decoder", arguments.decoder_steps, further)):
        preset = {"preset": "autoencoder-tiny-cpu", "loop": "hand"}
        flags = {**preset, **words, "output_dir": out / name, "max_steps": steps, **more}
        command = train_command(1, out / "log" / name, **flags)
        run_stage(Stage(name, "training", command, 0))
    pack(out)


def draw_pictures(rng: np.random.Generator):
    """The pictures to train on, one after another."""
    catalog = read_catalog("en")
    known = catalog.find(QUICKSTART.drawn + QUICKSTART.held_out)
    for drawing in known:
        yield from [render(drawing.svg.read_text(encoding="utf-8"), SIDE)] * COPIES
    drawings = list(catalog.drawings.values())[HELD_OUT:]
    for drawing in drawings[:WHOLE]:
        yield render(drawing.svg.read_text(encoding="utf-8"), SIDE)
    for drawing in drawings[-PIECES:]:
        large = render(drawing.svg.read_text(encoding="utf-8"), SIDE * 2)
        left, top = (int(place) for place in rng.integers(0, SIDE, 2))
        yield large.crop((left, top, left + SIDE, top + SIDE))
    for _ in range(SCENES):
        yield draw_scene(rng)


def draw_scene(rng: np.random.Generator) -> Image.Image:
    """Shapes of many sizes, the larger ones fewer, each with a colour, a gradient and a texture of its own, in one
    light, now and then out of focus."""
    side = 2 * SIDE
    tint = rng.uniform(40, 215, 3)
    picture = _surface(rng, side, tint)
    for size in np.sort(side * rng.uniform(0.08, 1, rng.integers(3, 40)) ** 2)[::-1]:
        mask = Image.new("L", (side, side))
        corners = rng.choice([3, 4, 5, 24])
        angles = np.sort(rng.uniform(0, 2 * np.pi, corners)) if corners < 6 else np.linspace(0, 2 * np.pi, corners)
        centre, radii = rng.uniform(0, side, 2), size * rng.uniform(0.4, 1, 2)
        points = centre + radii * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        ImageDraw.Draw(mask).polygon([*map(tuple, points)], fill=255)
        own = np.clip(0.5 * tint + 0.5 * rng.uniform(0, 255, 3) + rng.normal(0, 25, 3), 0, 255)
        picture.paste(_surface(rng, side, own), mask=mask.filter(ImageFilter.GaussianBlur(int(rng.choice([0, 1, 3])))))
    picture = picture.filter(ImageFilter.GaussianBlur(int(rng.choice([0, 0, 1, 2]))))
    light = 1 + rng.uniform(0, 0.5) * _waves(rng, side, 2)[..., None]
    lit = Image.fromarray((np.asarray(picture) * light).clip(0, 255).astype(np.uint8))
    small = lit.resize((SIDE, SIDE), Image.Resampling.BOX)
    return Image.blend(small.convert("L").convert("RGB"), small, rng.uniform(0.2, 1))


def _surface(rng: np.random.Generator, side: int, colour: np.ndarray) -> Image.Image:
    rough = rng.exponential(14) * _waves(rng, side, int(rng.choice([2, 4, 12, 32])))
    pixels = colour + rough[..., None] * rng.uniform(0.5, 1.2, 3)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _waves(rng: np.random.Generator, side: int, cells: int) -> np.ndarray:
    """A smooth random field [side, side] of about unit deviation."""
    coarse = Image.fromarray(rng.normal(size=(cells, cells)).astype(np.float32))
    return np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC))


def pack(out: Path) -> None:
    """The package's folder: weights in float16, the config and the recipes of both trainings."""
    target = PACKAGED / "vae_tiny"
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(out / "decoder/vae/config.json", target / "config.json")
    shutil.copy(out / "run" / RECIPE_FILE, target / RECIPE_FILE)
    shutil.copy(out / "decoder" / RECIPE_FILE, target / "recipe-decoder.yaml")
    arrays = read_component_arrays(out / "decoder/vae")
    write_safetensors(target / "model.safetensors", cast(arrays, "float16"), "pd")


def held_out(photographs: list[str]) -> dict[str, list[np.ndarray]]:
    """Pictures [48, 48, 3] uint8 by their kind, none of them trained on."""
    drawings, rng = list(read_catalog("en").drawings.values())[:HELD_OUT], np.random.default_rng(1)
    quickstart = read_catalog("en").find(QUICKSTART.drawn)
    found = {
        "quickstart": [render(one.svg.read_text(encoding="utf-8"), SIDE) for one in quickstart],
        "drawings": [render(one.svg.read_text(encoding="utf-8"), SIDE) for one in drawings],
        "scenes": [draw_scene(rng) for _ in range(HELD_OUT)],
    }
    for path in photographs:
        whole = Image.open(path).convert("RGB")
        whole.thumbnail((5 * SIDE, 5 * SIDE))
        places = [
            (x, y) for x in range(0, whole.width - SIDE + 1, SIDE) for y in range(0, whole.height - SIDE + 1, SIDE)
        ]
        found[Path(path).stem] = [whole.crop((x, y, x + SIDE, y + SIDE)) for x, y in places]
    return {name: [*map(np.asarray, pictures)] for name, pictures in found.items()}


def measure(pictures: list[np.ndarray]) -> float:
    """PSNR, dB, of what the packaged autoencoder makes of pictures from the means of their latents."""
    import paddle

    from ppldm.weights.fill import load_vae

    vae = load_vae("vae_tiny")
    vae.eval()
    pixels = np.stack(pictures).transpose(0, 3, 1, 2).astype("float32") / 127.5 - 1
    with paddle.no_grad():
        made = vae.decode(vae.encode(paddle.to_tensor(pixels)).latent_dist.mode()).sample.numpy()
    return float(10 * np.log10(4 / np.square(made.clip(-1, 1) - pixels).mean()))


if __name__ == "__main__":
    main()
