"""The loaders that are compared: each makes batches of pixels and token ids from the same rows.

A loader here is a function (folder, resolution, workers) -> iterator of batch sizes, over the rows of the folder again
and again. What is not installed raises ImportError, whose remedy is in NEEDS.

The usual pipeline and the two peers crop at random from the whole image, resized by Pillow's Lanczos, and hand over
float32 in -1 .. 1. ppldm's batches hold bytes, scaled on the device, and also the noise, timesteps and caption drops of
the training step. The peers' transforms are those of torchvision, in Pillow and torch; their captions go through the
same Rust tokenizer as ppldm's, the usual pipeline's through PaddleNLP's.
"""

import base64
import gzip
import io
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from ppldm.data.filelist import read_sources, write_filelist
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.data.order import Mix, StepSampler
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab, load_tokenizer
from ppldm.utils.processes.ranks import World

BATCH_SIZE = 16
CROP_FRACTION = 0.9
MAX_TOKENS = 77
# Two workers share the files of the loaders that cannot enter a file in the middle.
NUM_FILES = 4
NEEDS = {"webdataset": "pip install webdataset torch", "streaming": "pip install mosaicml-streaming torch torchvision"}


def write_rows(folder: Path, rows: list[Row]) -> None:
    """The rows in the files that `usual` and `ppldm` read, and the tokenizer of all."""
    names = [f"part-{number:05}.gz" for number in range(NUM_FILES)]
    for number, name in enumerate(names):
        write_part(folder / name, rows[number::NUM_FILES])
    write_filelist(folder / "rows.filelist", names)
    CaptionTokenizer(build_vocab(row.caption for row in rows), MAX_TOKENS).save(folder / "tokenizer")


def ppldm(folder: Path, resolution: int, workers: int, interpolation: str = "lanczos") -> Iterator[int]:
    """As training reads."""
    from ppldm.data.loader import BatchLoader

    dataset = open_dataset(folder, resolution, interpolation)
    sampler = StepSampler(Mix(dataset.list_sizes, None, 0), BATCH_SIZE, BATCH_SIZE, World(), 0, 1 << 30)
    for batch in BatchLoader(dataset, sampler, workers):
        yield len(batch["pixel_values"])


def open_dataset(folder: Path, resolution: int, interpolation: str, buckets: str = "off", smart: bool = False):
    """The rows as ppldm's data set, with a VAE of 4 channels and 8 times downscaling in mind."""
    from ppldm.config.data import DataOptions
    from ppldm.data.dataset import TextImageDataset
    from ppldm.data.images import CropRule
    from ppldm.data.inputs import Level, Normals, Pixels, Tokens
    from ppldm.data.select.selection import select_rows
    from ppldm.data.shapes import shape_rule
    from ppldm.utils.rng import Stream

    inputs = {
        "pixel_values": Pixels(),
        "posterior_noise": Normals(Stream.POSTERIOR, 4, 8),
        "input_ids": Tokens(MAX_TOKENS),
        "timesteps": Level(Stream.TIMESTEP, 1000),
        "noise": Normals(Stream.NOISE, 4, 8),
    }
    tokenizer, sources = load_tokenizer(folder / "tokenizer", MAX_TOKENS), read_sources(folder / "rows.filelist")
    rule = shape_rule(DataOptions(resolution=resolution, buckets=buckets), BATCH_SIZE)
    crops = CropRule(interpolation=interpolation, random=not smart, smart=smart)
    selection = select_rows(sources, shapes=rule)
    return TextImageDataset(sources, inputs, resolution, 0, tokenizer, crops=crops, selection=selection)


def usual(folder: Path, resolution: int, workers: int) -> Iterator[int]:
    """gzip, base64, Pillow, paddle.vision.transforms and PaddleNLP's tokenizer, line by line."""
    from paddle.io import DataLoader, IterableDataset, get_worker_info

    stages = usual_stages(folder, resolution)

    class Rows(IterableDataset):
        def __iter__(self):
            worker = get_worker_info()
            paths = sorted(folder.glob("part-*.gz"))
            for path in itertools.cycle(paths[worker.id :: worker.num_workers] if worker else paths):
                with gzip.open(path, "rt", encoding="utf-8", newline="\n") as lines:
                    for line in lines:
                        caption, _, image = line.rstrip("\n").split("\t")
                        pixels = stages["image"](image)
                        yield pixels, stages["tokens"](caption)

    for pixels, _ in DataLoader(Rows(), batch_size=BATCH_SIZE, num_workers=workers):
        yield len(pixels)


def usual_stages(folder: Path, resolution: int) -> dict:
    """The usual pipeline in pieces: "decode" (base64 to picture), "transform", "image" (both), "tokens"."""
    from paddle.vision import transforms
    from paddlenlp.transformers import BertTokenizer

    tokenizer = BertTokenizer.from_pretrained(str(folder / "tokenizer"))
    transform = transforms.Compose(
        [
            transforms.Resize(int(resolution / CROP_FRACTION), "lanczos"),
            transforms.RandomCrop(resolution),
            transforms.ToTensor(),
            transforms.Normalize(0.5, 0.5),
        ]
    )

    def decode(text: str) -> Image.Image:
        return Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB")

    def tokens(caption: str) -> np.ndarray:
        encoded = tokenizer(caption, padding="max_length", truncation=True, max_length=MAX_TOKENS)
        return np.array(encoded["input_ids"])

    return {
        "decode": decode,
        "transform": transform,
        "image": lambda text: transform(decode(text)),
        "tokens": tokens,
    }


def webdataset(folder: Path, resolution: int, workers: int) -> Iterator[int]:
    """WebDataset's tar files in torch's DataLoader."""
    import webdataset
    from torch.utils.data import DataLoader

    shards = sorted(map(str, folder.glob("shard-*.tar")))
    if not shards:
        rows = _read_rows(folder)
        for number in range(NUM_FILES):
            with webdataset.TarWriter(str(folder / f"shard-{number:05}.tar")) as tar:
                for row in rows[number::NUM_FILES]:
                    tar.write({"__key__": row.meta["key"], "jpg": row.image, "txt": row.caption})
        shards = sorted(map(str, folder.glob("shard-*.tar")))
    transform = _torch_transform(folder, resolution)
    samples = (
        webdataset.WebDataset(shards, shardshuffle=False, empty_check=False)
        .repeat()
        .map(lambda sample: transform(sample["jpg"], sample["txt"].decode()))
    )
    for pixels, _ in DataLoader(samples, batch_size=BATCH_SIZE, num_workers=workers):
        yield len(pixels)


def streaming(folder: Path, resolution: int, workers: int) -> Iterator[int]:
    """MosaicML's streaming data set in torch's DataLoader."""
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    local = folder / "mds"
    if not local.exists():
        with MDSWriter(out=str(local), columns={"image": "bytes", "caption": "str"}) as writer:
            for row in _read_rows(folder):
                writer.write({"image": row.image, "caption": row.caption})
    transform = _torch_transform(folder, resolution)

    class Rows(StreamingDataset):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            return transform(row["image"], row["caption"])

    rows = Rows(local=str(local), batch_size=BATCH_SIZE, shuffle=True)
    while True:
        for pixels, _ in DataLoader(rows, batch_size=BATCH_SIZE, num_workers=workers):
            yield len(pixels)


def _read_rows(folder: Path) -> list[Row]:
    dataset = open_dataset(folder, 8, "lanczos")
    return [dataset.read_row(number) for number in range(len(dataset))]


def _torch_transform(folder: Path, resolution: int):
    """(JPEG file, caption) to (float32 [3, R, R], ids): torchvision's Resize, RandomCrop, ToTensor and Normalize."""
    import torch

    torch.set_num_threads(1)
    tokenizer = load_tokenizer(folder / "tokenizer", MAX_TOKENS)
    short_side = int(resolution / CROP_FRACTION)

    def transform(image: bytes, caption: str):
        picture = Image.open(io.BytesIO(image)).convert("RGB")
        scaled = [short_side * side // min(picture.size) for side in picture.size]
        picture = picture.resize(scaled, Image.Resampling.LANCZOS)
        left, top = (int(torch.randint(0, side - resolution + 1, (1,))) for side in scaled)
        picture = picture.crop((left, top, left + resolution, top + resolution))
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous().float().div(255)
        return pixels.sub_(0.5).div_(0.5), tokenizer.encode([caption])[0]

    return transform


LOADERS = {
    "usual": usual,
    "webdataset": webdataset,
    "streaming": streaming,
    "ppldm lanczos": ppldm,
    "ppldm area": lambda *arguments: ppldm(*arguments, interpolation="area"),
}
