"""What a student draws in few steps beside its teacher:  python benchmarks/few_steps.py --teacher RUN --student RUN

Both draw the prompts of the shapes world from the same noise: the teacher as it says itself and in fewer steps, by its
own sampler and by dpm-solver++, and the student by `lcm`. Pictures of one object are graded, each share with Wilson's
interval, and the student's 4 steps are compared with the teacher's own prompt by prompt. docs/drawing.md says how such
a student is trained.
"""

import argparse
from pathlib import Path

import numpy as np
from results import add_result_flags, save_results

import ppldm
from ppldm.diffusion.drawing import KEPT, Drawing
from ppldm.evaluation.composition import grade_pictures

STEPS, BATCH = (1, 2, 4), 64
SHOWN = ("value", "low", "high", "chance", "pictures", "right")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="a model or a run")
    parser.add_argument("--student", required=True, help="one that was distilled from it")
    parser.add_argument("--world", type=Path, default="shapes_world", help="what docs/evaluation.md makes")
    parser.add_argument("--prompts", type=int, default=256, help="of each split")
    parser.add_argument("--seed", type=int, default=1)
    add_result_flags(parser, "few_steps")
    arguments = parser.parse_args()
    prompts = [line.partition("\t")[0] for split in ("seen", "heldout") for line in
               (arguments.world / f"data/prompts-{split}.txt").read_text(encoding="utf-8").splitlines()
               [: arguments.prompts]]  # fmt: skip
    teacher, student = (ppldm.load(path) for path in (arguments.teacher, arguments.student))
    usual = Drawing().fit(teacher.model.process, teacher.model.usual)
    drawings = [(teacher, "teacher", usual)]
    drawings += [(teacher, "teacher", Drawing(steps, usual.guidance_scale, name)) for name in
                 (usual.sampler, "dpm-solver++") for steps in STEPS]  # fmt: skip
    drawings += [(student, "student", Drawing(steps, 1.0, "lcm")) for steps in STEPS]
    found = [measure(*one, prompts, arguments.seed) for one in drawings]
    asked = next(one for one in found if one["model"] == "student" and one["num_inference_steps"] == 4)
    difference = compare(asked, found[0])
    print("the student in 4 steps less the teacher:", difference)
    for one in found:
        for score in one["scores"].values():
            del score["right"]
    save_results(arguments, {"drawings": found, "difference": difference})


def measure(model, name: str, drawing: Drawing, prompts: list[str], seed: int) -> dict:
    """Scores by split and attribute, of pictures of one object."""
    settings = {key: getattr(drawing, key) for key in KEPT}
    pictures = model.generate(prompts, seed=seed, batch_size=BATCH, **settings)[:, 0]
    scores = {f"{one['split']}.{one['attribute']}": {key: value for key, value in one.items() if key in SHOWN}
              for one in grade_pictures(pictures, prompts)["scores"] if one["scenes"] == "single"}  # fmt: skip
    shown = ", ".join(f"{key} {one['value']:.1%}" for key, one in scores.items())
    print(f"{name}, {drawing}: {shown}", flush=True)
    passes = drawing.num_passes() * (1 if drawing.guidance_scale == 1 else 2)
    return {"model": name, **drawing.as_dict(), "passes": passes, "scores": scores}


def compare(one: dict, other: dict) -> dict:
    """By score: the mean difference between two drawings of the same prompts, with its 95 % interval."""
    found = {}
    for name, score in one["scores"].items():
        each = np.subtract(score["right"], other["scores"][name]["right"], dtype=float)
        half = 1.96 * each.std(ddof=1) / len(each) ** 0.5
        found[name] = {"value": each.mean(), "low": each.mean() - half, "high": each.mean() + half}
    return found


if __name__ == "__main__":
    main()
