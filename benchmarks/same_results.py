"""Are all results the same to the bit as those of another checkout?

    python benchmarks/same_results.py --save before.json      before a change: run all, keep the digests
    python benchmarks/same_results.py before.json             after it: run all again, list what differs
    python benchmarks/same_results.py main                    the same in one go, against a commit (twice the time)
    python benchmarks/same_results.py before.json --only "ldm*" "format*"     a part, and what it needs

Every family trains by the hand-written loop and by PaddleNLP's Trainer, on the smallest networks; one of them from each
format of data, with every switch of the objective, with adapters, resumed, on two ranks, from cached latents. Pictures
are drawn by each kind of pipeline; data is converted, filtered, searched for duplicates; weights are exported. Kept is
a digest of all that decides: rows of a batch, loss, gradient norm and rate of each update, every tensor of checkpoints,
averages and exported weights, pixels of pictures, bytes of parts and indexes. What says how long something took is not.

All runs are forked from one process that has imported the checkout's code, two at a time, on one thread each. Only
command lines are used, so the code behind them may move. Ends with status 1 where a digest differs, is new or is gone.

Digests below data, convert, dedup and filter have no network in them, and need no certain processor; all others are
compared on one machine, since another one rounds sums otherwise.
"""

import argparse
import base64
import contextlib
import csv
import fnmatch
import gzip
import hashlib
import importlib
import io
import json
import os
import pkgutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Numbers of metrics.jsonl and of JSON results that are of the machine.
OF_THE_MACHINE = ("_per_second", "_share", "_cost", "peak_", "time", "seconds", "memory")
TENSORS, BYTES = (".pdparams", ".pdopt"), (".gz", ".idx", ".columns", ".safetensors", ".latents", ".npy", ".tsv")
ROWS, SIDE = 24, 72
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_DEBUG_CPU_TYPE": "5", "USE_TORCH": "0", "PPLDM_CACHE_DIR": "cache"}

# Family -> preset and what it needs here. Every run has the flags COMMON.
COMMON = {
    **{"file_list": "data/part.list", "max_steps": 3, "save_steps": 2, "logging_steps": 1, "resolution": 32},
    **{"per_device_train_batch_size": 4, "image_logging_steps": 0, "report_to": "none", "warmup_steps": 1},
}
TEXT = {"tokenizer_name": "tokenizer", "vae_name_or_path": "vae_tiny", "validation_prompts": "a red square"}
CASCADE = {"tokenizer_name": "tokenizer", "resolution": 64, "per_device_train_batch_size": 2, "ema_start_iters": 1}
SHAPES = {**TEXT, "vae_name_or_path": "autoencoder-hand/vae", "latents": "off"}  # four channels
TRANSFORMER = {**SHAPES, "patch_masking": 0.25}
FAMILIES = {
    "autoencoder": ("autoencoder-tiny-cpu", {"vae_config_file": "vae_shapes_world"}),
    "cascade_autoencoder": ("cascade-a-tiny-cpu", {}),
    "ldm": ("ldm-tiny-cpu", {**TEXT, "gradient_accumulation_steps": 2}),
    "stable_diffusion": ("sd-tiny-cpu", SHAPES),
    "uvit": ("uvit-tiny-cpu", TRANSFORMER),
    "dit": ("dit-tiny-cpu", TRANSFORMER),
    "microdit": ("microdit-tiny-cpu", TRANSFORMER),
    "sd3": ("sd3-tiny-cpu", TRANSFORMER),
    "sdxl": ("sdxl-tiny-cpu", SHAPES),
    "controlnet": ("shapes-world-controlnet", {"model_name_or_path": "ldm-hand/pipeline"}),
    "cascade_decoder": ("cascade-b-tiny-cpu", {**CASCADE, "vqgan_name_or_path": "cascade_autoencoder-hand/vqgan"}),
    "cascade_prior": ("cascade-c-tiny-cpu", CASCADE),
    "cascade_controlnet": (
        "cascade-controlnet-tiny-cpu",
        {**CASCADE, "prior_name_or_path": "cascade_prior-hand/prior"},
    ),
}
FORMATS = ("gzip", "webdataset", "folder", "csv", "parquet", "mds")
SWITCHES = {
    **{"rescale_betas_zero_snr": True, "snr_gamma": 5, "noise_offset": 0.1, "input_perturbation": 0.1},
    **{"random_flip": True, "caption_drop": 0.3, "scale_lr": True, "unet_learning_rate": 2e-3, "interpolation": "area"},
    **{
        "crop_fraction": 0.9,
        "random_crop": True,
        "dataloader_num_workers": 1,
        "lr_scheduler_type": "polynomial",
        "latents": "off",
    },
}
FLOW = {"prediction_type": "flow", "stratified_timesteps": True, "loss_weighting": "adaptive", "latents": "off"}


def tasks() -> dict[str, tuple[list[str], tuple[str, ...]]]:
    """Name -> (words of `ppldm`, names of the tasks before it). A run's folder has its task's name."""
    data = "data/part.list"
    found = {"vocab": (["vocab", data, "--out", "tokenizer", "--size", "200"], ())}

    def train(name: str, family: str, loop: str = "hand", needs: tuple = (), **changes) -> None:
        preset, own = FAMILIES[family]
        flags = {**COMMON, **own, "output_dir": name, **changes}
        words = [word for flag, value in flags.items() if value is not None for word in (f"--{flag}", str(value))]
        found[name] = (["train", "--loop", loop, "--preset", preset, *words], ("vocab", *needs))

    before = {"controlnet": "ldm-hand", "cascade_decoder": "cascade_autoencoder-hand"}
    before |= {"cascade_controlnet": "cascade_prior-hand"}
    before |= dict.fromkeys(("stable_diffusion", "uvit", "dit", "microdit", "sd3", "sdxl"), "autoencoder-hand")
    for family in FAMILIES:
        for loop in ("hand", "trainer"):
            train(f"{family}-{loop}", family, loop, (before[family],) if family in before else ())
    for name in FORMATS:
        train(f"format-{name}", "ldm", max_steps=2, file_list=f"data/{name}.list", latents="off")
    train("ldm-switches", "ldm", **SWITCHES)
    train("ldm-switches-trainer", "ldm", "trainer", **SWITCHES)
    train("ldm-flow", "ldm", **FLOW)
    train("ldm-adapters", "ldm", lora_rank=2, lora_modules="out", train_tokens="square", latents="off")
    train("ldm-stopped", "ldm", max_steps=3)
    resumed, _ = found["ldm-stopped"]
    found["ldm-resumed"] = ([*resumed, "--max_steps", "5", "--accept_changes", "max_steps"], ("ldm-stopped",))
    train("ldm-cached", "ldm", needs=("precompute",), latents="cached", latents_dir="latents")
    train("ldm-ranks", "ldm", sharding="stage1", devices="0,1")
    found |= _other_tasks(data)
    return found


def _other_tasks(data: str) -> dict:
    latents = ["--vae", "vae_tiny", "--resolutions", "32", "--latents-dir", "latents", "--crop-fraction", "1.0"]
    few = ["--prompt", "a red square", "a blue circle", "--num-inference-steps", "3", "--seed", "4"]
    found = {
        "precompute": (["precompute", data, *latents], ("vocab",)),
        "convert": (["convert", "data/folder", "--out", "convert", "--rows-per-part", "7", "--size", "40"], ()),
        "dedup": (["dedup", data, "--out", "dedup"], ("vocab",)),
        "filter": (["filter", "--input", "data/metadata.parquet", "--output", "filter", "--min-width", "200"], ()),
        "rows-of-a-batch": (["replay", "ldm-hand", "--step", "2", "--json"], ("ldm-hand",)),
        "export": (["export", "ldm-hand/pipeline", "--to", "diffusers", "--out", "export"], ("ldm-hand",)),
    }
    for family in ("ldm", "stable_diffusion", "uvit", "dit", "microdit", "sd3", "sdxl"):
        words = ["generate", "--model", f"{family}-hand/pipeline", "--out", f"pictures-{family}", *few]
        found[f"pictures-{family}"] = (words, (f"{family}-hand",))
    for sampler in ("euler-ancestral", "dpm-solver++", "unipc"):
        words = ["generate", "--model", "ldm-hand/pipeline", "--out", f"pictures-{sampler}", *few, "--sampler", sampler]
        found[f"pictures-{sampler}"] = (words, ("ldm-hand",))
    return found


def write_data(folder: Path) -> None:
    """The same rows in every format, by the standard library and pyarrow alone."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    rng, rows = np.random.default_rng(0), []
    for number in range(ROWS):
        blocks = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        buffer = io.BytesIO()
        blocks.resize((SIDE, SIDE - number % 3), Image.Resampling.BICUBIC).save(buffer, "PNG")
        caption = f"a {['red', 'blue', 'green'][number % 3]} {['square', 'circle'][number % 2]} number {number}"
        rows.append((f"{number:05}", caption, buffer.getvalue()))
    lines = [f"{text}\t{json.dumps({'key': key})}\t{base64.b64encode(png).decode()}\n" for key, text, png in rows]
    (folder / "folder").mkdir(parents=True)
    for key, text, png in rows:
        (folder / f"folder/{key}.png").write_bytes(png)
        (folder / f"folder/{key}.txt").write_text(text)
    halves = [lines[: ROWS // 2], lines[ROWS // 2 :]]
    for number, half in enumerate(halves):
        members = b"".join(gzip.compress(line.encode(), mtime=0) for line in half)
        (folder / f"part-{number}.gz").write_bytes(members)
    (folder / "gzip.gz").write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
    with tarfile.open(folder / "rows.tar", "w") as tar:
        for key, text, png in rows:
            for name, content in ((f"{key}.png", png), (f"{key}.txt", text.encode())):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    with open(folder / "rows.csv", "w", newline="") as file:
        csv.writer(file).writerows([("dir", "text"), *((f"folder/{key}.png", text) for key, text, _ in rows)])
    images = [{"bytes": png, "path": None} for _, _, png in rows]
    pq.write_table(pa.table({"image": images, "text": [text for _, text, _ in rows]}), folder / "rows.parquet")
    sizes = {"WIDTH": [100 + 9 * n for n in range(ROWS)], "HEIGHT": [300] * ROWS}
    links = {"URL": [f"http://a.example/{n}" for n in range(ROWS)], "TEXT": [text for _, text, _ in rows]}
    pq.write_table(pa.table({**links, **sizes}), folder / "metadata.parquet")
    _write_mds(folder / "rows.mds", rows)
    names = {"part": ["part-0.gz", "part-1.gz"], "gzip": ["gzip.gz"], "webdataset": ["rows.tar"]}
    names |= {"folder": ["folder"], "csv": ["rows.csv"], "parquet": ["rows.parquet"], "mds": ["rows.mds"]}
    for name, files in names.items():
        (folder / f"{name}.filelist").write_text("".join(f"data/{one}\n" for one in files))
        options = f" 1 format={name}" if name not in ("part", "gzip") else ""
        (folder / f"{name}.list").write_text(f"data/{name}.filelist{options}\n")


def _write_mds(path: Path, rows: list) -> None:
    import numpy as np

    samples = []
    for _, text, png in rows:
        head = np.array([len(text), len(png)], "<u4").tobytes()
        samples.append(head + text.encode() + png)
    stated = {
        **{"column_encodings": ["str", "png"], "column_names": ["caption", "png"], "column_sizes": [None, None]},
        **{"compression": None, "format": "mds", "hashes": [], "size_limit": 1 << 26, "version": 2},
    }
    config = json.dumps(stated, sort_keys=True).encode()
    starts = np.cumsum([0, *map(len, samples)]) + 4 + 4 * (len(samples) + 1) + len(config)
    path.write_bytes(np.array([len(samples), *starts], "<u4").tobytes() + config + b"".join(samples))


def play(patterns: list[str], jobs: int) -> None:
    """Run the tasks in this folder with the ppldm that is on the path. Ends the process at the first that fails."""
    write_data(Path("data"))
    Path("logs").mkdir()
    _import_all()
    waiting, done, running = _asked(tasks(), patterns), set(), {}
    while waiting or running:
        ready = [name for name, (_, needs) in waiting.items() if done.issuperset(needs)]
        for name in ready[: jobs - len(running)]:
            running[_fork(name, waiting.pop(name)[0])] = name, time.monotonic()
        pid, status = os.wait()
        name, started = running.pop(pid)
        print(f"{time.monotonic() - started:6.1f} s  {name}", flush=True)
        if status:
            sys.exit(f"{name} failed with {status}:\n{Path('logs', name).read_text()[-3000:]}")
        done.add(name)


def _asked(known: dict, patterns: list[str]) -> dict:
    """The tasks of these names, with all that they need."""
    names = [name for name in known if any(fnmatch.fnmatch(name, one) for one in patterns)]
    for name in names:
        names += [one for one in known[name][1] if one not in names]
    return {name: task for name, task in known.items() if name in names}


def _import_all() -> None:
    import ppldm

    for module in pkgutil.walk_packages(ppldm.__path__, "ppldm.", onerror=lambda name: None):
        with contextlib.suppress(ImportError):  # an extra's
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


def _fork(name: str, words: list[str]) -> int:
    """The process that runs `ppldm words`; what it prints goes to logs/name, standard output to logs/name.out."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for number, file in ((1, f"logs/{name}.out"), (2, f"logs/{name}")):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
        sys.argv = ["ppldm", *words]
        from ppldm.__main__ import main

        main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def digests(folder: Path) -> dict[str, str]:
    """Each result by its path below `folder`."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not name.startswith("cache/") and (digest := digest_of(path)) is not None:
            if name.startswith("dedup/hashes/"):  # whose names come from where their parts lie
                name = f"dedup/hashes/{digest}"
            found[name] = digest
    return found


def digest_of(path: Path) -> str | None:
    """Of what a file says, whatever its format does not fix; None of a file that is no result."""
    if path.suffix in TENSORS:
        import paddle

        return _digest(_plain(paddle.load(str(path), return_numpy=True)))
    if path.name == "metrics.jsonl":
        return _digest([_lasting(json.loads(line)) for line in path.read_text().splitlines()])
    if path.name == "rows-of-a-batch.out":
        return _digest(json.loads(path.read_text())["samples"])
    if path.suffix == ".png":
        from PIL import Image

        return _digest(Image.open(path).convert("RGB").tobytes())
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return _digest(pq.read_table(path).to_pydict())
    return _digest(path.read_bytes()) if path.suffix in BYTES else None


def _lasting(value):
    """JSON without what is of the machine."""
    if isinstance(value, dict):
        return {k: _lasting(v) for k, v in value.items() if not any(word in k for word in OF_THE_MACHINE)}
    return [_lasting(one) for one in value] if isinstance(value, list) else value


def _plain(value):
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in sorted(value.items(), key=lambda item: str(item[0]))}
    return f"{value.dtype}{value.shape}{_digest(value.tobytes())}" if hasattr(value, "tobytes") else repr(value)


def _digest(value) -> str:
    data = value if isinstance(value, bytes) else json.dumps(value, sort_keys=True, default=repr).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def results_of(tree: Path, out: Path, arguments: argparse.Namespace) -> dict[str, str]:
    """Run the tasks with the code of `tree` in the new folder `out`; the digest of each result."""
    out.mkdir()
    words = ["--play", *(["--only", *arguments.only] if arguments.only != ["*"] else []), "--jobs", str(arguments.jobs)]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(tree)}
    environment["PPLDM_CACHE_DIR"] = str(out / "cache")
    done = subprocess.run([sys.executable, __file__, *words], cwd=out, env=environment)
    if done.returncode:
        sys.exit(f"the code of {tree} does not run all; the last lines say which")
    return digests(out)


def main() -> None:
    """Compare, print, exit with status 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("against", nargs="?", help="a file that --save wrote, or a commit, which is run first")
    parser.add_argument("--save", type=Path, metavar="OUT", help="keep this checkout's digests in OUT")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="these tasks, with * for any letters")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (2)")
    parser.add_argument("--play", action="store_true", help=argparse.SUPPRESS)
    if "--play" in sys.argv:  # the code on the path is another checkout's, which `results` below may not know
        arguments = parser.parse_args()
        return play(arguments.only, arguments.jobs)
    from results import add_result_flags, export_commit, save_results

    add_result_flags(parser, "same_results")
    arguments = parser.parse_args()
    if not arguments.against and not arguments.save:
        parser.error("name a saved file or a commit to compare with, or --save OUT")
    before = None
    with tempfile.TemporaryDirectory() as top:
        if arguments.against and Path(arguments.against).is_file():
            before = json.loads(Path(arguments.against).read_text())
        elif arguments.against:
            before = results_of(export_commit(arguments.against, Path(top, "tree")), Path(top, "before"), arguments)
        now = results_of(ROOT, Path(top, "now"), arguments)
    if arguments.save:
        arguments.save.write_text(json.dumps(now, indent=1) + "\n")
        print(f"{len(now)} digests in {arguments.save}")
    if before is None:
        return None
    if arguments.only != ["*"]:
        before = {
            name: digest for name, digest in before.items() if name.split("/")[0] in {n.split("/")[0] for n in now}
        }
    names = sorted(before.keys() | now.keys())
    differing = [name for name in names if before.get(name) != now.get(name)]
    for name in differing:
        print(f"differs: {name} (before {before.get(name)}, now {now.get(name)})")
    print(f"{len(names) - len(differing)} of {len(names)} results equal those of {arguments.against}")
    equal = len(names) - len(differing)
    save_results(arguments, {"against": arguments.against, "equal": equal, "differing": differing})
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
