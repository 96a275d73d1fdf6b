"""Short runs of the toy family, which trains in milliseconds, and what can go wrong with one."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import paddle
from command_line import parse_arguments
from toy import FAMILY as TOY

from ppldm.data.filelist import write_filelist
from ppldm.data.formats.part import Part, write_part
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.utils.checksums import checksum_file, checksum_json

ROOT = Path(__file__).resolve().parents[2]


def flags(folder, file_list, **changes) -> list[str]:
    """12 updates of 4 rows, a line of the log every 2 and a checkpoint every 4."""
    settings = {
        "config": ROOT / "tests/helpers/toy.yaml", "output_dir": folder, "file_list": file_list, "seed": 5,
        "max_steps": 12, "logging_steps": 2, "save_steps": 4, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1, "dataloader_num_workers": 0, "report_to": "none", **changes,
    }  # fmt: skip
    return [word for name, value in settings.items() for word in (f"--{name}", str(value))]


def train(folder, file_list, **changes) -> Path:
    run_loop(prepare(*parse_arguments(flags(folder, file_list, **changes), True, TOY.Config)))
    return folder


def read_rows(part: Path) -> list:
    """All rows of a part."""
    with closing(Part(part)) as opened:
        return [opened.read(number) for number in range(len(opened))]


def change_row(tiny, folder: Path, number: int) -> Path:
    """A filelist of the data of `tiny` in which row `number` of the first part has the next row's picture."""
    folder.mkdir()
    parts = sorted(tiny.folder.glob("part-*.gz"))
    for path in parts:
        rows = read_rows(path)
        if path == parts[0]:
            rows[number] = replace(rows[number], image=rows[number + 1].image)
        write_part(folder / path.name, rows)
    write_filelist(folder / "all.filelist", [folder / path.name for path in parts])
    return folder / "all.filelist"


def flip_weight(checkpoint: Path, name: str) -> None:
    """Change one element of a saved tensor, as a fault of the memory does before a checkpoint is written."""
    path = checkpoint / "model_state.pdparams"
    state = paddle.load(str(path))
    value = state[name].numpy()
    value.flat[3] += 0.5
    state[name].set_value(value)
    paddle.save(state, str(path))
    seal(checkpoint)


def seal(checkpoint: Path, **changes) -> None:
    """Write a manifest that is sound again, with `changes`."""
    manifest = json.loads((checkpoint / "manifest.json").read_text()) | changes
    manifest.pop("crc32")
    manifest["files"] = {name: checksum_file(checkpoint / name) for name in manifest["files"]}
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "crc32": checksum_json(manifest)}))
