"""`ppldm embed`: what a network makes of each picture of filelists, kept for `ppldm dedup --embeddings`.

OUT/00000.npy, 00001.npy, ...   one a part: float16 [rows, dim], of length 1; zeros where a row has no picture
OUT/embeddings.json             written last: network, digest of its weights, convention, dim, and of each part its
                                path, file, rows, identity (bytes, CRC-32) and rows without a picture by reason
"""

from collections import Counter
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Annotated

import numpy as np

from ..data.filelist import read_sources
from ..data.formats.layouts import DEFAULT_LAYOUT
from ..data.formats.open import open_part
from ..data.images import decode_pixels
from ..utils.entry import entry
from ..utils.errors import ConfigError, DataError, RowError
from ..utils.files import atomic_write, local_path, make_output_dir, read_json, write_json
from ..utils.log import progress
from ..utils.text import print_report

_AT_ONCE = 256  # pictures decoded before they go to the network


def embed(
    filelists: Annotated[str, {"nargs": "+", "metavar": "FILELIST"}],  # filelists, lists of filelists, or folders
    network: Annotated[str, {"opt": True, "required": True}],  # dinov2:PATH, clip:PATH, inception:PATH, or pixels
    out: Annotated[str, {"opt": True, "required": True}],  # folder for the embeddings; made if missing
    layout: str = DEFAULT_LAYOUT,  # column order of the parts of lists that name none (docs/data.md)
    device: str = None,  # what to compute on, as --device of train: cpu, gpu, npu …, gpu:1
    offline: bool = False,  # never touch the network
    json: bool = False,  # print the account as JSON
):
    """Compute embeddings of all pictures by a network, for `ppldm dedup --embeddings OUT`.

    PATH is a file or folder of weights, or a name, as for `ppldm evaluate`. Stopped at any point, the same command goes
    on with the next part; a part that has changed is made again.
    """
    from .features.base import NETWORKS, load_features

    name, _, path = network.partition(":")
    parts = [(part, source) for one in filelists for source in read_sources(one, layout) for part in source.parts]
    is_paddle = name in NETWORKS and NETWORKS[name].flag is not None
    with entry() if is_paddle else nullcontext():
        loaded = load_features(name, path or None, device=device, offline=offline)
        report = embed_parts(parts, loaded, local_path(out))
    print_report(report, _describe, json)


def embed_parts(parts: list[tuple], network, out: Path) -> dict:
    """Write the embeddings of (path, source) by a FeatureNetwork into the folder `out`; return what is in
    embeddings.json. Raises ConfigError where the folder is another network's, DataError, OutputError."""
    make_output_dir(out)
    told = {"network": network.name, "digest": network.digest, "convention": network.convention, "dim": network.dim}
    known = read_json(out / "plan.json")
    if known not in (None, told):
        raise ConfigError(f"{out} holds embeddings of another network ({known['network']}); choose another --out")
    write_json(out / "plan.json", told)
    with progress(parts, desc="embed", unit="part") as bar:
        made = [_embed_part(path, source, network, out, f"{number:05}") for number, (path, source) in enumerate(bar)]
    report = told | {"parts": made}
    write_json(out / "embeddings.json", report)
    return report


def _embed_part(path: Path, source, network, out: Path, name: str) -> dict:
    record = out / f".{name}.json"
    with closing(open_part(path, source)) as rows:
        told = {"path": str(path), "file": f"{name}.npy", "rows": len(rows), "identity": list(rows.identity)}
        found = read_json(record)
        if found and (out / told["file"]).is_file() and {key: found.get(key) for key in told} == told:
            return found
        record.unlink(missing_ok=True)
        embeddings, skipped = np.zeros((len(rows), network.dim), np.float16), Counter()
        for start in range(0, len(rows), _AT_ONCE):
            numbers, pictures = [], []
            for row in range(start, min(start + _AT_ONCE, len(rows))):
                try:
                    pictures.append(decode_pixels(rows.read(row).image))
                    numbers.append(row)
                except RowError as error:
                    skipped[error.reason] += 1
            if pictures:
                features = network(pictures)
                lengths = np.linalg.norm(features, axis=1, keepdims=True)
                embeddings[numbers] = features / np.maximum(lengths, np.finfo(np.float32).tiny)
    if not np.isfinite(embeddings).all():
        raise DataError(f"the network {network.name} makes no finite numbers of {path}; check its weights")
    with atomic_write(out / told["file"]) as file:
        np.save(file, embeddings)
    told["skipped"] = dict(sorted(skipped.items()))
    write_json(record, told)
    return told


def _describe(report: dict) -> str:
    rows, skipped = sum(part["rows"] for part in report["parts"]), Counter()
    for part in report["parts"]:
        skipped.update(part["skipped"])
    lines = [f"{rows - skipped.total():,} of {rows:,} rows have an embedding of {report['dim']} numbers"]
    return "\n".join([*lines, *(f"  no picture, {reason}: {count:,}" for reason, count in skipped.items())])
