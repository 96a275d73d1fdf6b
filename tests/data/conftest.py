"""Small pictures, rows, parts and data sets, made on the spot."""

import io
from functools import partial

import numpy as np
import pytest
from PIL import Image

from ppldm.data.control import make_filter
from ppldm.data.dataset import TextImageDataset
from ppldm.data.filelist import read_sources, write_filelist
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.data.images import CropRule
from ppldm.data.inputs import Control, Level, Moments, Normals, Pixels, Sizes, Sum, TextEmbeddings, Tokens, Uncached
from ppldm.data.text.captions import CaptionRule
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.utils.rng import Stream


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    """Keep what tests cache out of the home folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("PPLDM_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(scope="session")
def make_image():
    def make(number=0, size=(20, 18), format="PNG", mode="RGB") -> bytes:
        pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).convert(mode).save(buffer, format)
        return buffer.getvalue()

    return make


@pytest.fixture(scope="session")
def make_rows(make_image):
    def make(start, stop) -> list[Row]:
        return [Row(f"picture {i} 图", make_image(i, (20 + i % 3, 18)), {"key": str(i)}) for i in range(start, stop)]

    return make


@pytest.fixture
def make_sources(tmp_path, make_rows):
    """Sources whose row number n is caption "picture n 图"; sizes: rows of each part, of each filelist."""

    def make(*lists, weights=None):
        row, lines = 0, []
        for i, sizes in enumerate(lists):
            names = [f"list{i}-part-{j:05}.gz" for j in range(len(sizes))]
            for name, size in zip(names, sizes, strict=True):
                write_part(tmp_path / name, make_rows(row, row + size))
                row += size
            write_filelist(tmp_path / f"list{i}.filelist", names)
            lines.append(f"list{i}.filelist" + (f" {weights[i]}" if weights else ""))
        write_filelist(tmp_path / "train.filelist.list", lines)
        return read_sources(tmp_path / "train.filelist.list")

    return make


def latent_inputs(pixels_only=False, channels=4, factor=8, levels=1000, noise_offset=0.0, input_perturbation=0.0,
                  cached=False, control=None):  # fmt: skip
    """What a latent diffusion model asks a batch for; of an autoencoder with `pixels_only`."""
    normals = partial(Normals, channels=channels, factor=factor)
    inputs = {"pixel_values": Pixels(), "posterior_noise": normals(Stream.POSTERIOR)}
    if pixels_only:
        return inputs
    noise = Sum(normals(Stream.NOISE), noise_offset, normals(Stream.NOISE_OFFSET, factor=None))
    inputs |= {
        "input_ids": Tokens(8),
        "text_embeddings": TextEmbeddings(8, 4),
        "timesteps": Level(Stream.TIMESTEP, levels),
        "noise": noise if noise_offset else noise.first,
        "sizes": Sizes(0.3),
    }
    if cached:
        inputs |= {"moments": Moments(channels, factor), "uncached": Uncached()}
    if control:
        inputs["control"] = Control(make_filter(control))
    if input_perturbation:
        inputs["input_noise"] = Sum("noise", input_perturbation, normals(Stream.INPUT_PERTURBATION))
    return inputs


@pytest.fixture
def make_dataset(make_sources):
    def make(sources=None, inputs=None, **settings) -> TextImageDataset:
        """`inputs`: the arguments of `latent_inputs`; `captions`, `crops`: those of the rules."""
        inputs = latent_inputs(**inputs or {})
        tokenizer = CaptionTokenizer(build_vocab(["picture 0123456789 图"]), 8) if "input_ids" in inputs else None
        rules = {"captions": CaptionRule(**{"drop_probability": 0.1, **settings.pop("captions", {})}),
                 "crops": CropRule(**settings.pop("crops", {}))}  # fmt: skip
        arguments = {"resolution": 16, "seed": 7, "tokenizer": tokenizer, **rules, **settings}
        return TextImageDataset(sources or make_sources([5, 9], [10]), inputs, **arguments)

    return make
