"""`ppldm quickstart --pictures FOLDER`: from a folder of pictures to pictures of its captions.

The folder is looked at first (`data.text.survey`). What follows from it lies in OUT as files to be changed, which the
stages read:

    captions.csv       pictures and captions, unless these are in files beside the pictures and OUT lies elsewhere
    prompts.txt        what is drawn during and after the training
    autoencoder.yaml   the recipe of the autoencoder, where it is trained
    diffusion.yaml     the recipe of the text-to-image model

A file that was changed by hand is kept as it is. A stage whose files, or whose pictures, are others than before is made
anew. OUT/.done/plan.json holds what was found and written.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

from ..config.load import file_layers, last_value
from ..data.text.survey import survey
from ..data.text.vocabulary import languages_of, length_of
from ..families.first_training import FirstTraining
from ..utils.checksums import digest_of
from ..utils.errors import ConfigError
from ..utils.files import make_output_dir, read_json, write_json, write_text
from ..utils.finished import Piece, take_fingerprint
from ..utils.pictures import caption_font
from ..utils.stages import DONE, Stage, command, drawing_stages, train_command
from ..weights.folders import share_trained

_RECORD = f"{DONE}/plan.json"
_TABLE, _PROMPTS, _AUTOENCODER, _DIFFUSION = "captions.csv", "prompts.txt", "autoencoder.yaml", "diffusion.yaml"
_FILELIST = "data/custom.filelist.list"
_KEPT_SIDES = 4  # pictures are made smaller once, to so many times the resolution: larger ones may be tried later


def plan_pictures(folder, out: Path, processes: int, write: bool = True, **wishes) -> tuple[list[Stage], list[str]]:
    """(the stages, lines that say what was found and chosen), after writing the files that the stages read. wishes: of
    `FirstTraining.choose`. Raises ConfigError, DataError for a folder that cannot be trained on."""
    found = survey(folder)
    if any(out.resolve() in (one, *one.parents) for one in {path.parent.resolve() for path in found.files}):
        raise ConfigError(f"--out {out} holds the pictures of {folder}; name a folder without pictures for the results")
    caption_font(text="".join(found.captions.values()))  # which says at once where Chinese would be boxes
    record = read_json(out / _RECORD, optional=True) or {}
    pieces = [Piece(path, str(path.relative_to(found.folder))) for path in found.files]
    fingerprint = take_fingerprint(pieces, record.get("pictures"))
    is_same = record.get("pictures", {}).get("content") == fingerprint["content"]
    chosen = FirstTraining.choose(found, **wishes, known=record.get("quality") if is_same else None)
    made, written = _make_files(chosen, out), record.get("written", {})
    kept = {name: text for name in made if (text := _changed_by_hand(out / name, written.get(name))) is not None}
    for name, field in ((_AUTOENCODER, "autoencoder_steps"), (_DIFFUSION, "steps")):
        steps = last_value(file_layers(out / name), "run.max_steps") if name in kept else None
        chosen = replace(chosen, **{field: steps}) if isinstance(steps, int) and steps > 0 else chosen
    if write:
        make_output_dir(out / DONE)
        new = {name: text for name, text in made.items() if name not in kept}
        for name, text in new.items():
            write_text(out / name, text)
        written |= {name: digest_of(text) for name, text in new.items()}
        write_json(out / _RECORD, {"pictures": fingerprint, "written": written, "quality": chosen.quality})
    lines = chosen.describe()
    lines += [] if write else [f"the commands read {', '.join(made)} in {out}, which this dry run does not write"]
    lines += [f"{out / name} was changed by hand and is used as it is; delete it to have it made anew" for name in kept]
    inputs = {name: digest_of(text) for name, text in (made | kept).items()} | {"pictures": fingerprint["content"]}
    return _make_stages(chosen, out, processes, inputs), lines


def _changed_by_hand(path: Path, written: str | None) -> str | None:
    """The text of a file that is not as it was `written`; None of others."""
    text = path.read_text(encoding="utf-8", errors="surrogateescape") if path.is_file() else None
    return None if text is None or digest_of(text) == written else text


def _make_files(chosen: FirstTraining, out: Path) -> dict[str, str]:
    head = f"# Made by `ppldm quickstart --pictures`. Train with: ppldm train --config {out}/{{}}\n"
    made = {_PROMPTS: "".join(f"{one}\n" for one in chosen.prompts())}
    if chosen.found.way != "files" or out.resolve().is_relative_to(chosen.found.folder.resolve()):
        made[_TABLE] = chosen.found.table_text()
    vae, filelist = None, str(out / _FILELIST)
    if chosen.trains_autoencoder:
        folder, vae = str(out / "autoencoder"), str(out / "autoencoder/vae")
        made[_AUTOENCODER] = chosen.autoencoder_recipe(head.format(_AUTOENCODER), filelist, folder)
    own = str(out / "diffusion"), str(out / "tokenizer"), vae, [str(out / _PROMPTS)]
    return made | {_DIFFUSION: chosen.diffusion_recipe(head.format(_DIFFUSION), filelist, *own)}


def _make_stages(chosen: FirstTraining, out: Path, processes: int, inputs: dict[str, str]) -> list[Stage]:
    """The stages; `inputs`: digests of the pictures and of the files in OUT, by name."""
    source = out / _TABLE if _TABLE in inputs else chosen.found.folder.absolute()
    convert = command("convert", source, out=out / "data", size=_KEPT_SIDES * chosen.resolution)
    vocab = command("vocab", out / _FILELIST, out=out / "tokenizer")
    captions = list(chosen.found.captions.values())
    vocab += ("--max-length", str(length_of(captions)), "--language", *languages_of(captions))
    pictures = tuple(inputs[name] for name in ("pictures", _TABLE) if name in inputs)

    def train(family: str, name: str, title: str, steps: int) -> Stage:
        ranks, recipe = min(processes, chosen.batch(family)), f"{name}.yaml"
        flags = {"config": out / recipe, "per_device_train_batch_size": chosen.batch(family) // ranks}
        words, done = train_command(ranks, out / "log" / name, **flags), partial(share_trained, out / name, steps)
        what = f"training the {title}, {steps} updates, samples every {chosen.sample_every(family)}"
        return Stage(name, what, words, chosen.seconds(family), done, (inputs[recipe],), steps)

    stages = [
        Stage("data", "reading the pictures", convert, 2 + 0.05 * len(captions), inputs=pictures),
        Stage("tokenizer", "learning the words of the captions", vocab, 2),
    ]
    if chosen.trains_autoencoder:
        stages.append(train("autoencoder", "autoencoder", "autoencoder", chosen.autoencoder_steps))
    stages.append(train("ldm", "diffusion", "text-to-image model", chosen.steps))
    return stages + drawing_stages(out, out / _PROMPTS, "drawing pictures of some captions", (inputs[_PROMPTS],))
