"""The commands of a page of the documentation, and what they become at a small scale.

A block marked as bash is run line by line as it stands, in a folder with small data (`WORLD`), unless a comment before
it says why not: `<!-- not run: needs a GPU -->`, of the reasons in `REASONS` only. `<!-- file: NAME -->` before a block
makes it a file of that name. The `ppldm` of these blocks is one that makes a command small first (`small`).
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

REASONS = (
    "needs a GPU",
    "needs several machines",
    "needs Spark",
    "needs Slurm",
    "needs an account at a store",
    "needs large weights of others",
    "fetches from the internet",
    "installs software",
    "runs the tests",
    "waits for a browser",
    "needs a run that is training",
    "trains for hours",
    "an excerpt",
)
RUN_BY = re.compile(r"(tests/[\w/]+\.py) runs it")

# What the commands of all pages find in their folder: data, tiny models and a run, under the names of the pages.
WORLD = """
ppldm demo-data --world shapes --out shapes_world/data --size 32 --max-objects 2
ppldm train --preset shapes-world-autoencoder
ppldm precompute shapes_world/data/demo.filelist.list --vae shapes_world/autoencoder/vae --resolutions 32 \
    --crop-fraction 1
ppldm train --preset shapes-world
ppldm train --preset shapes-world --latents off --ema_posthoc 0.05 0.10 --ema_posthoc_every 1 --output_dir output
ppldm train --preset sd-tiny-cpu --text_encoder_config_file clip_77.json --model_max_length 77 \
    --output_dir stable_diffusion
ppldm demo-data --out quickstart/data --subset quickstart --size 48
ppldm train --preset autoencoder-tiny-cpu
ppldm convert quickstart/data/images --out data
"""
# Folders of it that pages know by other names, and lists of its rows.
COPIES = {
    "shapes_world/autoencoder/vae": "VAE outputs/autoencoder/vae CompVis/stable-diffusion-v1-4/vae",
    "output": "outputs/run outputs/other outputs/small quickstart/diffusion OUT RUN",
    "output/pipeline": "MODEL",
    "stable_diffusion/pipeline": "stable-diffusion-v1-5/stable-diffusion-v1-5 PIPELINE openai/clip-vit-large-patch14",
    "quickstart/data/images": "pictures my_dog my_pictures photographs pictures/g7.5",
}
# Folders of it that a page makes itself.
OWN = {"docs/evaluation.md": "shapes_world", "README.md": "outputs", "docs/cascade.md": "shapes_world"}
# Headings from which on a page needs nothing of what stands before: two tests in place of a long one.
DIVIDED = {"docs/finetune.md": "## Try it without any download"}
LISTS = (
    *("train.filelist", "my.filelist", "MY.filelist", "held_out.filelist", "heldout.filelist", "laion.filelist"),
    *("data/filelist/train.filelist", "data/filelist/heldout.filelist", "FILELIST"),
)
FILES = {
    "prompts.txt": "a red circle\na blue cross\n",
    "prompts.tsv": "caption_en\na red circle\na blue cross\n",
    "FILE": "a red circle\na blue cross\n",
    "domains.txt": "example.com\n",
    "urls.txt": "http://example.com/a.jpg\n",
    "keys.txt": "000010002\n",
    "list.txt": "http://example.com/a.jpg\n",
    "blip.jsonl": '{"key": "1F319", "caption": "a moon"}\n',
    "caption.py": "import json, sys\n"
    "for line in sys.stdin:\n"
    "    print(json.dumps({'row': json.loads(line)['row'], 'caption': 'a thing'}), flush=True)\n",
    "my.yaml": "base: shapes-world\nrun: {output_dir: runs/my}\ndata: {latents: off}\n",
    # A text encoder like clip_tiny that reads as many tokens as the published ones.
    "clip_77.json": json.dumps(
        json.loads((ROOT / "ppldm/config/networks/clip_tiny.json").read_text()) | {"max_position_embeddings": 77}
    ),
}

# Flags that win over those of the page and of its preset, and values of its own flags that become these.
_TRAIN = {
    "--max_steps": "2",
    "--per_device_train_batch_size": "2",
    "--gradient_accumulation_steps": "1",
    "--dataloader_num_workers": "0",
    "--image_logging_steps": "0",
    "--save_steps": "1",
    "--logging_steps": "1",
    "--resolution": "32",
}
ADDED = {
    "train": _TRAIN,
    "finetune": {"--steps": "1", "--num-class-pictures": "4"},
    "quickstart": {"--steps": "2", "--autoencoder-steps": "2"},
    "demo-data": {"--rows": "48", "--redo": ""},
    "generate": {"--num-inference-steps": "2"},
    "evaluate": {"--num-samples": "8", "--num-inference-steps": "2", "--num-real": "8"},
}
REPLACED = {
    "precompute": {"--resolutions": "32"},
    "ema": {"--step": "2"},
    "replay": {"--step": "2", "--row": "31"},
    "stats": {"--settings": "resolution=32"},
    "generate": {"--size": "32x32"},
}
# What "…" stands for in `ppldm train …`.
THE_RUNS_OWN = (
    *("--preset", "shapes-world", "--latents", "off"),
    *("--output_dir", "outputs/new", "--overwrite_output_dir", "true"),
)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int  # of its fence, from 1
    reason: str | None  # why it is not run
    file: str | None  # the name of the file that it is


def blocks(path: Path) -> list[Block]:
    """All fenced blocks of a page."""
    text = path.read_text(encoding="utf-8")
    pattern = r"^(?:<!-- (not run|file): (.*?) -->\n)?(```+)(\w*)\n(.*?)^\3$"
    return [
        Block(
            found[4],
            found[5],
            text.count("\n", 0, found.start(3)) + 1,
            found[2] if found[1] == "not run" else None,
            found[2] if found[1] == "file" else None,
        )
        for found in re.finditer(pattern, text, re.MULTILINE | re.DOTALL)
    ]


def small(words: list[str]) -> list[str]:
    """A command's words at a small scale."""
    name, rest = words[0], words[1:]
    if {"--help", "--print_config", "--list_presets"} & set(rest):
        return words
    rest = [word for known in rest for word in (THE_RUNS_OWN if known in ("…", "...") else (known,))]
    added = ADDED.get(name, {})
    values = added | {flag: value for flag, value in REPLACED.get(name, {}).items() if flag in rest}
    kept, inside = [], False
    for word in rest:
        inside = word in values if word.startswith("--") else inside
        if not inside:
            kept.append(re.sub(r"(?<=/checkpoint-)\d+$", "2", word))
    return [name, *kept, *(word for pair in values.items() for word in pair if word)]
