"""Broken config files: one line with file, key and remedy, a status that is not 0, before Paddle or a row is read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What is written below `base: good.yaml` -> what the line must say.
BROKEN = {
    "data: {resolutoin: 64}": ["x.yaml:2: data.resolutoin is not known", "did you mean data.resolution?"],
    "data: {learning_rate: 1}": ["data.learning_rate is not known", "stands under optimizer: optimizer.learning_rate"],
    "resolution: 64": ["x.yaml:2: resolution is not known", "data.resolution"],
    "run:\n  train_batch_size: 3": ["x.yaml:3: run.train_batch_size", "called run.per_device_train_batch_size here"],
    "dta: {resolution: 64}": ["dta.resolution is not known", "data.resolution"],
    "data.resolution: 64": ["x.yaml:2: data.resolution is written in two lines"],
    "optimizer: {lr: 1e-3}": ["optimizer.lr is not known; it is called optimizer.learning_rate here"],
    "model: {unet: {layers: 3}}": ["model.unet is not known"],
    "family: ldmm": ["x.yaml:2: family ldmm is not known; did you mean ldm?"],
    "family: [ldm]": ["x.yaml:2: family", "is not known"],
    "family: autoencoder": ["model.", "is not known"],
    "data:\n  file_list: ???": ["x.yaml:3: data.file_list is ???", "data.file_list=VALUE"],
    "run: {output_dir: '${data.layout}/${nope.x}'}": ["x.yaml:2: run.output_dir", "'nope.x' not found"],
    "run: {seed: '${optimizer.power'}": ["x.yaml: run.seed", "correct it"],
    "data: {where: '${oc.env:NO_SUCH_VARIABLE}'}": ["x.yaml:2: data.where", "'NO_SUCH_VARIABLE' not found", "default"],
    "data: {where: '${oc.nope:1}'}": ["data.where", "Unsupported interpolation type oc.nope"],
    "run: {seed: '${run.max_steps}', max_steps: '${run.seed}'}": ["run.", "Recursive interpolation"],
    "data: {resolution: big}": ["x.yaml:2: data.resolution big must be a whole number"],
    "data: {resolution: 64.5}": ["data.resolution 64.5 must be a whole number"],
    "data: {resolution: [64]}": ["data.resolution [64] must be a whole number"],
    "data: {resolution: null}": ["data.resolution None must be a whole number"],
    "data: {resolution: true}": ["data.resolution True must be a whole number"],
    "data: {random_crop: 1}": ["data.random_crop 1 must be true or false"],
    "data: {where: 5}": ["data.where 5 must be text"],
    "logging: {report_to: wandb}": ["logging.report_to 'wandb' must be a list; write it in brackets"],
    "logging: {report_to: [wamdb]}": ["logging.report_to wamdb is not known; did you mean wandb?"],
    "optimizer: {lr_scheduler_type: cosinus}": ["lr_scheduler_type cosinus is not known; did you mean cosine?"],
    "data: {resolution: 0}": ["x.yaml:2: data.resolution 0 must be above 0"],
    "data: {caption_drop: 1.5}": ["data.caption_drop 1.5 must be from 0 to 1"],
    "optimizer: {learning_rate: -1}": ["optimizer.learning_rate -1", "must be above 0"],
    "optimizer: {learning_rate: .nan}": ["optimizer.learning_rate nan must be"],
    "run: {seed: -1}": ["run.seed -1 must be from 0 to"],
    "compute: {bf16: true, fp16: true}": ["x.yaml:2: --fp16 and --bf16 do not go together"],
    "compute: {to_static: true, recompute: true}": ["--to_static with --recompute", "omit one of them"],
    "compute: {sharding: stage3 offload}": ["--sharding stage3 offload is not supported", "use stage3"],
    "optimizer: {lr_batch_size: 8}": ["--lr_batch_size does nothing without --scale_lr"],
    "run: {max_steps: 0, num_train_epochs: 0}": ["run.num_train_epochs 0.0 must be above 0"],
    "model: {rescale_betas_zero_snr: true}": ["--rescale_betas_zero_snr", "v_prediction"],
    "model: {unet_name_or_path: UNET}": ["unet_name_or_path", "unet_config_file"],
    "data: {file_list: no/such.list}": ["x.yaml:2: --file_list no/such.list is not there"],
    "model: {unet_config_file: no/such.json}": ["no/such.json"],
    "data: {resolution: 33}": ["resolution 33"],
    "data: 3": ["x.yaml:2: data 3 must hold settings", "known: file_list"],
    "data: {layout: a}\ndata: {layout: b}": ["x.yaml:3: not YAML: found duplicate key data"],
    "data: {layout: a, layout: b}": ["x.yaml:2: not YAML: found duplicate key layout"],
    "data:\n  layout: a\n   where: b": ["x.yaml:4: not YAML", "correct that line"],
    "data: {layout: a": ["not YAML"],
    "data:\n\tlayout: a": ["x.yaml:3: not YAML", "cannot start any token"],
    "data: @a": ["x.yaml:2: not YAML"],
    "data: *nowhere": ["x.yaml:2: not YAML", "undefined alias"],
    "data: !!python/object/apply:os.system [ls]": ["x.yaml:2: not YAML", "could not determine a constructor"],
    "1: 2": ["x.yaml:2: the key 1 is not text"],
    "---\ndata: {}": ["x.yaml", "another document"],
}  # fmt: skip
# Whole files.
FILES = {
    "circle.yaml": (b"base: circle.yaml", ["base: goes round in a circle", "circle.yaml -> "]),
    "ring.yaml": (b"base: ring2.yaml", ["ring.yaml -> ", "ring2.yaml -> ", "remove one of them"]),
    "nobase.yaml": (b"base: nope.yaml", ["nobase.yaml:1: base nope.yaml is not there"]),
    "nopreset.yaml": (b"base: ldm-tiny-cpuu", ["base ldm-tiny-cpuu is not a preset; did you mean ldm-tiny-cpu?"]),
    "listbase.yaml": (b"base: [a, b]", ["listbase.yaml:1: base", "must be text"]),
    "list.yaml": (b"- a\n- b", ["list.yaml holds no settings; write lines such as"]),
    "text.yaml": (b"just words", ["text.yaml holds no settings"]),
    "empty.yaml": (b"", ["empty.yaml holds no settings"]),
    "latin.yaml": ("data: {layout: é}".encode("latin-1"), ["latin.yaml is not UTF-8", "save it as UTF-8"]),
    "binary.yaml": (b"PK\x03\x04\x00\x00", ["binary.yaml"]),
    "utf16.yaml": ("data: {}".encode("utf-16"), ["utf16.yaml is not UTF-8"]),
}
# Further words on a command line with good.yaml.
WORDS = {
    "data.resolutoin=64": ["data.resolutoin is not known; did you mean data.resolution?"],
    "dta.resolution=64": ["dta.resolution is not known"],
    "data.resolution=big": ["data.resolution big must be a whole number"],
    "logging.report_to=[a": ["logging.report_to [a is not a value in YAML's spelling"],
    "resolution": ["unexpected argument 'resolution'"],
    "--resolutoin=64": ["unknown flag --resolutoin; did you mean --resolution?"],
    "--preset=ldm-tiny": ["--preset ldm-tiny is not known; did you mean ldm-tiny-cpu?"],
    "--config=none.yaml": ["cannot read none.yaml (No such file or directory); name a YAML file"],
    "--resolution=0": ["--resolution 0 must be above 0"],
}

DRIVER = """
import contextlib, io, json, os, sys
from ppldm.cli.main import main
from ppldm.utils import entry
# What comes after the checks, and would begin to train.
entry.require_working_environment = lambda: sys.exit(0)
os.chdir(sys.argv[1])
for words in json.load(sys.stdin):
    err, status = io.StringIO(), 0
    sys.argv = ["ppldm", *words]
    with contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            status = stop.code
    print(json.dumps([status, err.getvalue(), "paddle" in sys.modules]))
"""


@pytest.fixture(scope="module")
def lines(tiny, tmp_path_factory) -> dict:
    """What `ppldm train` says of each broken file: {file or word: (status, stderr, whether paddle was loaded)}."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "good.yaml").write_text(
        f"model: {{vae_name_or_path: {tiny.vae}, text_encoder_config_file: {tiny.config('ldmbert')},\n"
        f"        unet_config_file: {tiny.config('unet')}, tokenizer_name: {tiny.tokenizer}, model_max_length: 12}}\n"
        f"data: {{file_list: {tiny.file_list}, resolution: 32}}\nrun: {{output_dir: out}}\n"
    )
    commands = {}
    for number, text in enumerate(BROKEN):
        place = folder / f"{number}"
        place.mkdir()
        (place / "x.yaml").write_text(f"base: ../good.yaml\n{text.replace('UNET', str(tiny.folder))}\n")
        commands[text] = ["train", "--config", f"{number}/x.yaml"]
    (folder / "ring2.yaml").write_text("base: ring.yaml")
    for name, (content, _) in FILES.items():
        (folder / name).write_bytes(content)
        commands[name] = ["train", "--config", name]
    commands |= {word: ["train", "--config", "good.yaml", word] for word in WORDS}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder)],
        input=json.dumps(list(commands.values())), capture_output=True, text=True, timeout=300, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (folder / "out").exists()
    return dict(zip(commands, map(json.loads, done.stdout.splitlines()), strict=True))


CASES = {**BROKEN, **{name: words for name, (_, words) in FILES.items()}, **WORDS}


@pytest.mark.parametrize("case", CASES)
def test_a_broken_recipe_is_one_line(lines, case):
    status, text, has_paddle = lines[case]
    assert status not in (0, None) and not has_paddle
    assert text.startswith("error: ") and text.count("\n") == 1 and "Traceback" not in text, text
    assert all(word in text for word in CASES[case]), text
