"""How near the previews of `ppldm app` come to what is decoded: python benchmarks/previews.py --model PIPELINE.

Four drawings; half-way and at the end, the preview of the latents is enlarged and compared with what the decoder makes
of the same latents. Beside it stands the best that any preview of so many pixels could be: the decoded picture, shrunk
to its size and enlarged again.
"""

import argparse
from statistics import fmean

import numpy as np
from PIL import Image
from results import add_result_flags, save_results

import ppldm
from ppldm.inference.serving.paint import Preview


def compare(shown: np.ndarray, decoded: np.ndarray) -> dict:
    """PSNR, dB, and correlation of a small picture and a larger one, uint8 [H, W, 3]."""
    large = np.asarray(Image.fromarray(shown).resize(decoded.shape[1::-1], Image.Resampling.BILINEAR), float)
    error = np.square(large - decoded).mean()
    return {"psnr": 10 * np.log10(255**2 / error), "correlation": np.corrcoef(large.ravel(), decoded.ravel())[0, 1]}


def measure(model, prompts: list[str], steps: int, guidance_scale: float) -> list[dict]:
    """Of the preview and of the best of its size, half-way and at the end: the mean over the drawings."""
    preview, seen = Preview(model.decode, model.model.vae.config.latent_channels), {}

    def keep(step, num_steps, latents):
        seen[step] = latents.numpy()

    model.generate(prompts, num_inference_steps=steps, guidance_scale=guidance_scale, callback=keep, batch_size=16)
    found = []
    for name, step in (("half-way", steps // 2), ("at the end", steps)):
        pairs = []
        for latents, decoded in zip(seen[step], model.decode(seen[step]), strict=True):
            shown = preview(latents[None])
            best = np.asarray(Image.fromarray(decoded).resize(shown.shape[1::-1], Image.Resampling.BOX))
            pairs.append((compare(shown, decoded), compare(best, decoded)))
        rows = {"preview": [one for one, _ in pairs], "best": [one for _, one in pairs]}
        for kind, values in rows.items():
            means = {key: round(fmean(float(one[key]) for one in values), 3) for key in ("psnr", "correlation")}
            found.append({"when": name, "kind": kind, **means})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="pipeline or checkpoint")
    parser.add_argument("--prompts", nargs=4, default=["a red circle", "a blue square", "a green triangle",
                                                       "a yellow circle above a purple square"])  # fmt: skip
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance-scale", type=float, default=3.0)
    add_result_flags(parser, "previews")
    arguments = parser.parse_args()
    found = measure(ppldm.load(arguments.model), arguments.prompts, arguments.steps, arguments.guidance_scale)
    for row in found:
        print(f"{row['when']:>11} {row['kind']:>8}: {row['psnr']:.1f} dB, correlation {row['correlation']:.2f}")
    save_results(arguments, found)


if __name__ == "__main__":
    main()
