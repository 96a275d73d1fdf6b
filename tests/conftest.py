"""What several tests need: a tiny data set, tiny configs, a tiny VAE, made once a session."""

import multiprocessing
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# What a test starts writes into pipes as a user's commands do, in blocks, though this machine may have it otherwise.
os.environ.pop("PYTHONUNBUFFERED", None)
# Java's machines of tests live for seconds: their code is compiled once and quickly.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
os.environ.setdefault("SPARK_LAUNCHER_OPTS", os.environ["SPARK_SUBMIT_OPTS"])

import gc
import io
import json
import logging
import signal
import tempfile
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import durations
import hypothesis
import needs
import numpy as np
import progress
import pytest
import warm_programs
import warm_start
from PIL import Image
from quick import pytest_ignore_collect, pytest_itemcollected  # noqa: F401
from sampling import count_workers, pytest_addoption, pytest_collection_modifyitems  # noqa: F401

from ppldm.utils.log import get_logger
from ppldm.utils.machine.cpu import prepare_cpu

# However busy the machine is: no example fails for its time.
hypothesis.settings.register_profile("ppldm", deadline=None)
hypothesis.settings.load_profile("ppldm")
get_logger()  # pytest listens to loggers that pass nothing on only where they are there before the test
# Before paddle is there, as a user's run does it: this process and all that it starts then compute the same bits,
# whichever test is the first to prepare the CPU.
prepare_cpu()
# No test cuts the power. What is made durable, and in which order, is a law of tests/utils/test_files.py.
os.fsync = lambda handle: None
# A shell starts what it runs in the background without Ctrl-C, and tests of Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    needs.required()  # a misspelt name must not pass unseen
    is_worker = hasattr(config, "workerinput")  # of pytest-xdist
    config.pluginmanager.register(progress.Worker(config) if is_worker else progress.Progress(config), "progress")
    crowd = count_workers(config) / (os.cpu_count() or 1)
    config.pluginmanager.register(durations.Recorder(config.getoption("record"), crowd), "durations")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """What a test, or a fixture of it, starts by `sys.executable` is there without the seconds of its imports."""
    with nullcontext() if item.get_closest_marker("cold") else warm_start.warm_children():
        return (yield)


def pytest_collection_finish(session):
    """What is there from now until the end is no garbage, and is not looked through again and again; nor is what tests
    make after every 700 objects, which took a tenth of their time. Tests stand in an empty folder: what commands left
    in the clone, as quickstart/, is nothing to them."""
    empty = tempfile.TemporaryDirectory()
    session.config.add_cleanup(empty.cleanup)
    session.config.add_cleanup(partial(os.chdir, os.getcwd()))  # before it, as the last that was added
    os.chdir(empty.name)
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


def pytest_runtest_setup(item):
    for mark in item.iter_markers("needs"):
        needs.need(*mark.args)


@pytest.fixture(autouse=True)
def own_environment(request):
    """What a test, or a command that it ran, leaves in the environment, or hides of it, is not so for the next one.

    ppdiffusers imports PyTorch wherever it is installed: more than a second of each process, and only parity needs it.
    """
    from ppldm.utils import text

    gc.callbacks.clear()  # hypothesis' own, in which a Ctrl-C would be lost
    before = dict(os.environ)
    if not {"torch", "diffusers"} & vars(request.module).keys() and not request.node.get_closest_marker("needs"):
        os.environ["USE_TORCH"] = "0"
    yield
    text._noted.clear()
    text._inside.clear()
    for name in [name for name in os.environ if name not in before]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def programs(tmp_path_factory) -> Path:
    """A folder with `python` and `ppldm`, which scripts of a shell start warm."""
    with warm_programs.serving(tmp_path_factory.mktemp("bin")) as folder:
        yield folder


VAE_CONFIG = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [8, 8, 8, 8],
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 4,
    "sample_size": 32,
}
UNET_CONFIG = {
    "sample_size": 4,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [16, 16],
    "layers_per_block": 1,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "attention_head_dim": 2,
    "cross_attention_dim": 32,
    "norm_num_groups": 8,
}
TEXT_ENCODER_CONFIG = {
    "vocab_size": 100,
    "max_position_embeddings": 12,
    "encoder_layers": 2,
    "encoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "head_dim": 8,
    "d_model": 32,
    "dropout": 0.0,
}
CLIP_CONFIG = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 12,
    "projection_dim": 32,
}
CASCADE_C_CONFIG = {
    "in_channels": 16,
    "out_channels": 16,
    "conditioning_dim": 16,
    "block_out_channels": [16, 16],
    "num_attention_heads": [2, 2],
    "down_num_layers_per_block": [1, 1],
    "up_num_layers_per_block": [1, 1],
    "block_types_per_layer": [["SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"]] * 2,
    "clip_text_in_channels": 32,
    "clip_text_pooled_in_channels": 32,
    "clip_image_in_channels": 8,
    "dropout": 0.0,
    "switch_level": [False],
}
CASCADE_B_CONFIG = {
    **CASCADE_C_CONFIG,
    **{"in_channels": 4, "out_channels": 4, "patch_size": 2, "num_attention_heads": [-1, 2]},
    **{"up_blocks_repeat_mappers": [2, 1], "clip_text_in_channels": None, "clip_image_in_channels": None},
    **{"effnet_in_channels": 16, "pixel_mapper_in_channels": 3, "switch_level": None},
    "block_types_per_layer": [
        ["SDCascadeResBlock", "SDCascadeTimestepBlock"],
        ["SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"],
    ],
    "timestep_conditioning_type": ["sca"],
}
UVIT_CONFIG = {
    "sample_size": 4,
    "in_channels": 4,
    "patch_size": 2,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "clip_dim": 32,
    "num_text_tokens": 12,
}
DIT_CONFIG = {
    "sample_size": 4,
    "in_channels": 4,
    "patch_size": 2,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": 32,
    "attention_bias": True,
    "norm_type": "ada_norm_single",
    "num_embeds_ada_norm": 1000,
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "activation_fn": "gelu-approximate",
}
MICRODIT_CONFIG = {
    **{"sample_size": 4, "in_channels": 4, "patch_size": 2, "dim": 32, "depth": 3, "head_dim": 8, "multiple_of": 16},
    **{"caption_channels": 32, "patch_mixer_depth": 2, "patch_mixer_dim": 16, "num_experts": 3},
}
SINGLE_STREAM_CONFIG = {
    **{"sample_size": 4, "in_channels": 4, "patch_size": 2, "dim": 32, "depth": 3, "head_dim": 8},
    **{"caption_channels": 32, "bottleneck": 12},
}
# By patches of 8 x 8 pixels: of more numbers (192) than the network is wide.
SINGLE_STREAM_PIXELS_CONFIG = SINGLE_STREAM_CONFIG | {"in_channels": 3, "sample_size": 32, "patch_size": 8}
SD3_CONFIG = {
    **{"sample_size": 4, "in_channels": 4, "out_channels": 4, "patch_size": 2, "num_layers": 2},
    **{"num_attention_heads": 2, "attention_head_dim": 16, "joint_attention_dim": 72, "caption_projection_dim": 32},
    **{"pooled_projection_dim": 64, "pos_embed_max_size": 6},
}


# Two CLIPs of width 32 side by side, and before six sizes the state of 32 numbers of the second.
SDXL_CONFIG = {
    **UNET_CONFIG,
    **{"down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"], "cross_attention_dim": 64},
    **{"up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"], "transformer_layers_per_block": [1, 2]},
    **{"use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 8},
    "projection_class_embeddings_input_dim": 32 + 6 * 8,
}


@dataclass(frozen=True)
class Tiny:
    """A folder with 40 rows of 36 x 32 pictures in two parts, and all that a run on them takes."""

    folder: Path

    @property
    def file_list(self) -> str:
        return str(self.folder / "tiny.filelist.list")

    @property
    def tokenizer(self) -> str:
        return str(self.folder / "tokenizer")

    @property
    def vae(self) -> str:
        return str(self.folder / "vae")

    def config(self, name: str) -> str:
        return str(self.folder / f"{name}.json")

    def flags(self, output_dir, **changes) -> list[str]:
        """A command line of either training script; `changes` replace or add flags, None removes one."""
        settings = {
            "output_dir": output_dir,
            "file_list": self.file_list,
            "vae_name_or_path": self.vae,
            "text_encoder_config_file": self.config("ldmbert"),
            "unet_config_file": self.config("unet"),
            "tokenizer_name": self.tokenizer,
            "model_max_length": 12,
            "resolution": 32,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 1,
            "max_steps": 4,
            "learning_rate": 1e-3,
            "weight_decay": 0.01,
            "logging_steps": 1,
            "save_steps": 100,
            "dataloader_num_workers": 0,
            "image_logging_steps": 0,
            "num_inference_steps": 2,
            "seed": 5,
            "report_to": "none",
            **changes,
        }
        return [word for name, value in settings.items() if value is not None for word in (f"--{name}", str(value))]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Tiny:
    from ppldm.data.filelist import write_filelist
    from ppldm.data.formats.part import write_part
    from ppldm.data.formats.row import Row
    from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
    from ppldm.networks.build import build_network, save_component
    from ppldm.networks.configs import read_new_config

    folder = tmp_path_factory.mktemp("tiny")
    rng = np.random.default_rng(0)
    rows = [Row(f"picture {number}", _png(rng), {}) for number in range(40)]
    write_part(folder / "part-00000.gz", rows[:25])
    write_part(folder / "part-00001.gz", rows[25:])
    write_filelist(folder / "tiny.filelist", ["part-00000.gz", "part-00001.gz"])
    write_filelist(folder / "tiny.filelist.list", ["tiny.filelist"])
    CaptionTokenizer(build_vocab([row.caption for row in rows]), 12).save(folder / "tokenizer")
    configs = {"vae": VAE_CONFIG, "unet": UNET_CONFIG, "ldmbert": TEXT_ENCODER_CONFIG, "clip": CLIP_CONFIG,
               "uvit": UVIT_CONFIG, "dit": DIT_CONFIG, "microdit": MICRODIT_CONFIG, "cascade_c": CASCADE_C_CONFIG,
               "cascade_b": CASCADE_B_CONFIG, "single_stream": SINGLE_STREAM_CONFIG, "sd3": SD3_CONFIG,
               "single_stream_pixels": SINGLE_STREAM_PIXELS_CONFIG, "sdxl": SDXL_CONFIG}  # fmt: skip
    for name, config in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    save_component(build_network("vae", read_new_config("vae", folder / "vae.json", ""), seed=1), folder / "vae")
    return Tiny(folder)


@pytest.fixture(scope="session")
def session():
    """One Spark for all tests of this process, which ppldm finds and leaves; its workers keep their gateways."""
    from ppldm.utils.machine.spark import spark_session

    handler, formatters = (
        signal.getsignal(signal.SIGINT),
        [(one, one.formatter) for one in logging.getLogger().handlers],
    )
    with spark_session("local[2]", 1.0) as session:
        for one, formatter in formatters:  # Spark makes all of them write JSON
            one.setFormatter(formatter)
        session.conf.set("spark.sql.shuffle.partitions", "4")  # 200 tasks of a shuffle take seconds
        signal.signal(signal.SIGINT, handler)  # Spark's own is for Spark's programs
        yield session


@pytest.fixture(scope="session")
def s3_server():
    needs.need("s3")
    from s3_here import s3_here

    with s3_here() as server:
        yield server


@pytest.fixture
def store(s3_server, tmp_path, monkeypatch):
    """An S3 server with an empty bucket `bucket`, and a cache folder of the test's own."""
    from s3_here import empty_bucket

    monkeypatch.setenv("PPLDM_CACHE_DIR", str(tmp_path / "cache"))
    with empty_bucket(s3_server, monkeypatch) as server:
        yield server


def _png(rng) -> bytes:
    """Four by four blocks of random colours."""
    picture = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize(
        (36, 32), Image.Resampling.NEAREST
    )
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def new_children():
    """What lists the processes of multiprocessing that began in this test: servers of several tests may be there."""
    before = multiprocessing.active_children()
    return lambda: [child for child in multiprocessing.active_children() if child not in before]


@pytest.fixture
def ctrl_c():
    """A function that sends this process a Ctrl-C in so many seconds."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda seconds: threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
    signal.signal(signal.SIGINT, handler)
