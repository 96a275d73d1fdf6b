"""Does a control network of Stable Cascade's stage C lead drawings?  python benchmarks/led_drawings.py DATA --prior C …

Each caption is drawn from the same noise with the edges of its picture and without. How far the centre of what is drawn
is from that of the picture's object, in pixels of a side of 128, with 95 % intervals of the change by a bootstrap over
drawings. The centre is that of all that differs from the ground by more than half of the most. `--sheet` shows
pictures, edges, drawings that are led, and the same that are not.
"""

import argparse
import io
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from results import add_result_flags, save_results

SIDE, FILTER = 128, "canny,resize=0"
CELL = 100  # pixels of the sheet, with a gap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", type=Path, help="part file of pictures that no training has seen")
    parser.add_argument("--prior", required=True, help="checkpoint of stage C")
    parser.add_argument("--decoder", required=True, help="checkpoint of stage B")
    parser.add_argument("--controlnet", required=True)
    parser.add_argument("--pictures", type=int, default=16)
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0, 3.0], help="of control")
    parser.add_argument("--sheet", type=Path, help="picture to write, of the last scale")
    add_result_flags(parser, "led_drawings")
    arguments = parser.parse_args()
    import ppldm
    from ppldm.data.formats.part import Part

    rows = [Part(arguments.part).read(number) for number in range(arguments.pictures)]
    pictures = [Image.open(io.BytesIO(row.image)).convert("RGB").resize((SIDE, SIDE)) for row in rows]
    model = ppldm.load(arguments.prior, decoder=arguments.decoder, controlnet=arguments.controlnet, ema=True)
    drawn = {scale: [] for scale in (0.0, *arguments.scales)}
    edges = []
    with tempfile.TemporaryDirectory() as folder:
        for row, picture in zip(rows, pictures, strict=True):
            picture.save(path := Path(folder, "picture.png"))
            edges.append(Image.fromarray(model.read_control(path, (SIDE, SIDE), FILTER)[0]))
            for scale, found in drawn.items():
                led = {"control": path, "control_filter": FILTER, "control_scale": scale} if scale else {}
                found.append(model.generate(row.caption, num_samples=2, guidance_scale=4.0, num_inference_steps=20,
                                            seed=5, output="pil", **led)[0])  # fmt: skip
    results = tell(pictures, drawn)
    for scale, facts in results.items():
        sys.stdout.write(f"control scale {scale}: {facts}\n")
    if arguments.sheet:
        make_sheet(pictures, edges, drawn[arguments.scales[-1]], drawn[0.0]).save(arguments.sheet)
    save_results(arguments, {"drawings": 2 * len(rows), "by_control_scale": results})


def tell(pictures: list, drawn: dict) -> dict:
    """By scale: pixels of distance, change from those without, its 95 % interval."""
    distances = {
        scale: np.array([np.linalg.norm(centre(one) - centre(picture))
                         for picture, ones in zip(pictures, found, strict=True) for one in ones])
        for scale, found in drawn.items()
    }  # fmt: skip
    rng, results = np.random.default_rng(0), {}
    for scale, found in distances.items():
        change = found - distances[0.0]
        means = change[rng.integers(0, len(change), (10_000, len(change)))].mean(axis=1)
        interval = [round(float(bound), 1) for bound in np.percentile(means, [2.5, 97.5])]
        results[f"{scale:g}"] = {"pixels": round(float(found.mean()), 1), "change": round(float(change.mean()), 1),
                                 "interval_95": interval}  # fmt: skip
    return results


def centre(picture) -> np.ndarray:
    """(y, x) in pixels."""
    pixels = np.asarray(picture.resize((SIDE, SIDE)), float)
    difference = np.abs(pixels - np.median(pixels.reshape(-1, 3), axis=0)).sum(axis=2)
    return np.argwhere(difference > difference.max() / 2).mean(axis=0)


def make_sheet(pictures: list, edges: list, led: list, not_led: list) -> Image.Image:
    columns = [(picture, edge, *one, *other) for picture, edge, one, other in
               zip(pictures, edges, led, not_led, strict=True)]  # fmt: skip
    sheet = Image.new("RGB", (CELL * len(columns), CELL * len(columns[0])), "white")
    for x, column in enumerate(columns):
        for y, one in enumerate(column):
            sheet.paste(one.convert("RGB").resize((CELL - 4, CELL - 4)), (CELL * x, CELL * y))
    return sheet


if __name__ == "__main__":
    main()
