"""What a frozen text encoder costs of a training step, and what its embeddings take:  python benchmarks/texts_step.py

The same step of the same model on cached latents of the same rows, from captions and from their cached embeddings. The
two take turns, step by step, on one thread, and each keeps its least CPU time, as in latents_step.py. The text encoder
is an LDMBert of 12 layers of 768, the depth and width of CLIP ViT-L/14's.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from latents_step import _with_moments
from results import add_result_flags, save_results
from train_step import _figures, _num_trained, _some_batches, _time, our_step, prepare, prepare_run

TOKENS = 77
WIDTHS = {"CLIP ViT-L/14, LDMBert of 12 layers": 768, "LDMBert of 32 layers": 1280}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="steps of each kind")
    parser.add_argument("--unet", default="unet_small", help="config of the UNet, a name or a file")
    parser.add_argument("--text-encoder", default="ldmbert_12", help="config of the text encoder, a name or a file")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--resolution", type=int, default=128, help="side of the pictures")
    add_result_flags(parser, "texts_step")
    arguments = parser.parse_args()
    arguments.rows, arguments.networks = 4 * arguments.batch_size, ["tiny"]
    from ppldm.utils.entry import entry

    with entry(), tempfile.TemporaryDirectory() as folder:
        results = {**measure(Path(folder), arguments), "bytes": measure_bytes()}
    kinds = {"captions": "from captions", "embeddings": "from cached embeddings"}
    lines = [f"{words:<24}{results[kind]['cpu']:>10.3f} s of CPU" for kind, words in kinds.items()]
    lines += [f"ratio {results['ratio']:.2f}", *(f"{one}" for one in results["bytes"])]
    sys.stdout.write("\n".join([*lines, ""]))
    save_results(arguments, results)


def measure(folder: Path, arguments: argparse.Namespace) -> dict:
    """Both kinds of step in turn: seconds of a step, and how many times as long it takes with the text encoder."""
    from ppldm.networks.model import encode_moments

    prepare(folder, arguments)
    networks = {"unet_config_file": arguments.unet, "text_encoder_config_file": arguments.text_encoder}
    run = prepare_run(folder, arguments, "run", freeze_text_encoder=True, model_max_length=TOKENS, **networks)
    step, times, model = our_step(run), {"captions": [], "embeddings": []}, run.state.model
    captions = [_with_moments(batch, run, encode_moments) for batch in _some_batches(run)]
    embeddings = [{**batch, "text_embeddings": model.encode_text(batch["input_ids"])} for batch in captions]
    for number in range(arguments.steps + 2):
        for kind, some in (("captions", captions), ("embeddings", embeddings)):
            times[kind].append(_time(step, some[number % len(some)]))
    found = {kind: _figures(pairs) for kind, pairs in times.items()}
    sizes = {"batch_size": arguments.batch_size, "resolution": arguments.resolution, "parameters": _num_trained(run)}
    return {**found, "ratio": found["captions"]["cpu"] / found["embeddings"]["cpu"], **sizes}


def measure_bytes() -> list[dict]:
    """Of the embeddings of a caption."""
    from ppldm.config.data import LATENTS_DTYPES
    from ppldm.data.cached.file import count_bytes
    from ppldm.data.cached.key import Cells

    return [
        {"text_encoder": name, "width": width, "dtype": dtype,
         "bytes": int(count_bytes(Cells(((TOKENS, width),), (1,), 1), dtype)[0])}
        for name, width in WIDTHS.items() for dtype in LATENTS_DTYPES
    ]  # fmt: skip


if __name__ == "__main__":
    main()
