"""What is written beside pictures: pictures.jsonl, and sheets of them with their prompts or settings."""

import json
from pathlib import Path

import numpy as np

from .plan import SCALE, Job, Plan, short

GRID_PROMPTS = 64  # at most, in a sheet of prompts, or of as many sheets


def write_summary(pipeline, plan: Plan, out: Path, columns: int) -> None:
    """pictures.jsonl, a line for each picture, and sheets of the first prompts: one for each guidance scale, or
    where they show the axes, one for each prompt."""
    from ...utils.files import write_text
    from ...utils.log import get_logger
    from ...utils.text import count_of

    lines = [
        json.dumps({"file": plan.file(*job), **plan.record(pipeline, *job)}, ensure_ascii=False) for job in plan.jobs()
    ]
    write_text(out / "pictures.jsonl", "".join(line + "\n" for line in lines))
    written = _write_grids(plan, out) if plan.labelled else _write_prompt_sheets(plan, out, columns)
    known = {out / plan.file(*job) for job in plan.jobs()}
    folders = {path.parent for path in known}
    if others := [path for folder in folders for path in folder.glob("*-[0-9][0-9].png") if path not in known]:
        get_logger().warning("%d pictures of other commands are in %s too, and not in pictures.jsonl", len(others), out)
    get_logger().info("%s and %s in %s", count_of(len(lines), "picture"), written, out)


def _write_prompt_sheets(plan: Plan, out: Path, columns: int) -> str:
    from ...utils.grid import prompt_grid
    from ...utils.pictures import save_png

    shown = plan.requests[:GRID_PROMPTS]
    for values in ((scale,) for scale in plan.axes[SCALE]):
        rows = [_pictures(plan, out, values, number) for number in range(len(shown))]
        captions = [f"{r.prompt}  ({r.remark})" if r.remark else r.prompt for r in shown]
        save_png(out / plan.folder(values) / "grid.png", prompt_grid(captions, rows, columns=columns))
    return "grid.png"


def _write_grids(plan: Plan, out: Path) -> str:
    from ...utils.grid import labelled_grid
    from ...utils.pictures import save_png

    (down, rows), (across, columns) = [("", [None])] * (2 - len(plan.axes)) + list(plan.axes.items())
    names = [f"{down} {short(value)}" if down else "" for value in rows]
    heads = [f"{across} {short(value)}" for value in columns]
    for number, request in enumerate(plan.requests[:GRID_PROMPTS]):
        cells = [
            [_pictures(plan, out, (row, column)[2 - len(plan.axes) :], number) for column in columns] for row in rows
        ]
        save_png(out / f"grid-{plan.number(number)}.png", labelled_grid(request.prompt, names, heads, cells))
    return "grid-*.png"


def _pictures(plan: Plan, out: Path, values: tuple, number: int) -> list[np.ndarray]:
    from PIL import Image

    jobs: list[Job] = [(values, number, plan.first + index) for index in range(plan.num_samples)]
    return [np.asarray(Image.open(out / plan.file(*job))) for job in jobs]
