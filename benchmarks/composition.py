"""How often the grader of the shapes world is right:  python benchmarks/composition.py [--vae FOLDER] [--json]

Scenes as `ppldm demo-data --world shapes` draws them, every fourth held out, in both languages, are graded as they are,
blurred by a Gaussian of 3 % of the side, written as JPEG by Pillow (quality 75, colours at half the resolution), and,
with --vae, encoded and decoded by that autoencoder at the size that it was trained for. A scene counts as right where
every attribute of every object is. Every error is listed.
"""

import argparse
import io
import time
from collections.abc import Callable

import numpy as np
from PIL import Image
from results import add_result_flags, save_results
from scipy import ndimage

from ppldm.demo.shapes_world.grammar import parse_caption
from ppldm.demo.shapes_world.write import World
from ppldm.evaluation.composition import find_objects, grade, wilson_interval


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=2000, help="of each size and treatment")
    parser.add_argument("--sizes", type=int, nargs="*", default=[32, 48, 64], help="of the pictures, in pixels")
    parser.add_argument("--vae", help="folder of an autoencoder, such as preset shapes-world-autoencoder makes")
    parser.add_argument("--vae-size", type=int, default=32, help="of its pictures, in pixels")
    parser.add_argument("--seed", type=int, default=1)
    add_result_flags(parser, "composition")
    arguments = parser.parse_args()
    treatments = [(size, name, treat) for size in arguments.sizes for name, treat in TREATMENTS.items()]
    if arguments.vae:
        treatments.append((arguments.vae_size, "autoencoder", load_autoencoder(arguments.vae)))
    results = []
    for size, name, treat in treatments:
        results.append({"size": size, "treatment": name, **measure(size, treat, arguments.scenes, arguments.seed)})
        found = results[-1]
        low, high = found["interval"]
        print(f"{size:>3} {name:<12}{found['right']:.3%} of {found['scenes']} right ({low:.2%} .. {high:.2%}), "
              f"{found['cpu_ms']:.1f} ms of CPU a picture", flush=True)  # fmt: skip
        for error in found["errors"]:
            print("     ", error, flush=True)
    save_results(arguments, results)


def measure(size: int, treat: Callable, scenes: int, seed: int) -> dict:
    """Grade so many scenes; what is right, what was wrong, and how long grading one takes."""
    world = World(size, "both", seed=seed)
    errors, seconds = [], 0.0
    for number in range(scenes):
        _, caption, picture = world.draw(number % 4 == 0, number)
        picture = treat(picture)
        started = time.process_time()
        result = grade(find_objects(picture), parse_caption(caption))
        seconds += time.process_time() - started
        if not result["everything"]:
            wrong = [name for name, right in result.items() if not right and name != "everything"]
            errors.append(f"{caption}: {', '.join(wrong)}")
    right = scenes - len(errors)
    return {
        "scenes": scenes,
        "right": right / scenes,
        "interval": wilson_interval(right, scenes),
        "errors": errors,
        "cpu_ms": 1000 * seconds / scenes,
    }


def blur(picture: np.ndarray) -> np.ndarray:
    width = 0.03 * len(picture)
    return ndimage.gaussian_filter(picture.astype(np.float32), (width, width, 0)).round().astype(np.uint8)


def compress(picture: np.ndarray) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG")
    return np.asarray(Image.open(file))


TREATMENTS = {"none": lambda picture: picture, "blur": blur, "jpeg": compress}


def load_autoencoder(folder: str) -> Callable:
    """A function that encodes a picture, to the mean of its posterior, and decodes it."""
    import paddle
    from ppdiffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(folder)
    vae.eval()

    @paddle.no_grad()
    def treat(picture: np.ndarray) -> np.ndarray:
        pixels = paddle.to_tensor(picture.astype(np.float32).transpose(2, 0, 1)[None] / 127.5 - 1)
        decoded = vae.decode(vae.encode(pixels).latent_dist.mode()).sample.numpy()[0].transpose(1, 2, 0)
        return ((decoded + 1) * 127.5).round().clip(0, 255).astype(np.uint8)

    return treat


if __name__ == "__main__":
    main()
