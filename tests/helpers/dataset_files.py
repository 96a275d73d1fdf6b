"""Every source of the registry in miniature: its archives, names and columns, and what must come of them."""

import io
import json
import tarfile
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
from web import encode, picture

SIDES = [(600, 520), (300, 280), (200, 400), (256, 256), (900, 700), (520, 640)]  # the third is too small
TOO_SMALL = 2


def pictures(first: int, count: int = 6, image_format: str = "JPEG") -> list[bytes]:
    return [encode(picture(first + i, SIDES[i % len(SIDES)]), image_format) for i in range(count)]


def tar_of(files: dict[str, bytes], mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def zip_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def parquet_of(columns: dict) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(columns), out)
    return out.getvalue()


def lines_of(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def cc12m() -> dict:
    files = {}
    for shard in range(4):
        samples = {}
        for i, image in enumerate(pictures(shard, 2 if shard else 6)):
            key = f"{shard:04}{i:05}"
            samples |= {f"{key}.jpg": image, f"{key}.json": b'{"url": "http://x"}', f"{key}.txt": b"A Cat, Stock Photo"}
        files["pixparse/cc12m-wds", f"cc12m-train-{shard:04}.tar"] = tar_of(samples)
    return files


def diffusiondb() -> dict:
    files, names, prompts, nsfw = {}, [], [], []
    for part in range(1, 5):
        images = {f"{part:04}-{i}.webp": image for i, image in enumerate(pictures(part, 6 if part == 1 else 1, "WEBP"))}
        names += images
        prompts += [f"prompt {name}" for name in images]
        images[f"part-{part:06}.json"] = b"{}"
        files["poloclub/diffusiondb", f"diffusiondb-large-part-1/part-{part:06}.zip"] = zip_of(images)
    nsfw = [0.21 if name in ("0001-0.webp", "0002-0.webp") else 0.2 for name in names]
    # The table knows pictures that nobody has, and lacks one that is there.
    names[-2] = "elsewhere.webp"
    columns = {"image_name": names, "prompt": prompts, "image_nsfw": nsfw, "prompt_nsfw": [0.0] * len(names)}
    files["poloclub/diffusiondb", "metadata-large.parquet"] = parquet_of(columns)
    return files


def coco(split: str = "val2014") -> dict:
    names = [f"COCO_{split}_{7 * i:012}.jpg" for i in range(6)]
    texts = [
        {"image_id": 7 * i, "id": 100 - n, "caption": f"{'first' if not n else 'other'} of {i}"}
        for n in (0, 1)
        for i in range(6)
    ]
    object_of_lists = {
        "info": {"year": 2014},
        "images": [{"id": 7 * i, "file_name": name, "height": 9} for i, name in enumerate(names)],
        "annotations": texts,
    }
    archive = zip_of({f"{split}/{name}": image for name, image in zip(names, pictures(0), strict=True)})
    annotations = {f"annotations/captions_{split}.json": json.dumps(object_of_lists).encode()}
    annotations |= {f"annotations/instances_{split}.json": b"{}"}
    host = "images.cocodataset.org"
    return {
        (host, f"zips/{split}.zip"): archive,
        (host, "annotations/annotations_trainval2014.zip"): zip_of(annotations),
    }


def textcaps() -> dict:
    archive = zip_of({f"train_images/{i:016x}.jpg": image for i, image in enumerate(pictures(0))})
    files = {("dl.fbaipublicfiles.com", "textvqa/images/train_val_images.zip"): archive}
    for split, numbers in (("train", (0, 1, 2, 3)), ("val", (4,))):  # the sixth is of the test
        rows = [
            {
                "image_id": f"{i:016x}",
                "set_name": split,
                "caption_id": 5 * i + n,
                "reference_strs": [f"first of {i}", "b"],
            }
            for i in numbers
            for n in range(5)
        ]
        content = json.dumps({"dataset_type": split, "data": rows}).encode()
        files["dl.fbaipublicfiles.com", f"textvqa/data/textcaps/TextCaps_0.1_{split}.json"] = content
    return files


def journeydb() -> dict:
    files, rows = {}, []
    for number in range(3):
        names = [f"{number:03}/{number}-{i}.jpg" for i in range(6)]
        images = dict(zip([f"./{name}" for name in names], pictures(number), strict=True))
        files["JourneyDB/JourneyDB", f"data/train/imgs/{number:03}.tgz"] = tar_of(images, "w:gz")
        rows += [{"img_path": f"./{name}", "prompt": f"prompt {name} --v 5", "Task1": {"a": 1}} for name in names]
    captions = tar_of({"train_anno_realease_repath.jsonl": lines_of(rows)}, "w:gz")
    files["JourneyDB/JourneyDB", "data/train/train_anno_realease_repath.jsonl.tgz"] = captions
    return files


def sa1b() -> dict:
    files, texts = {}, {}
    for number in range(11):
        members = {}
        for i, image in enumerate(pictures(number, 6 if not number else 1)):
            members |= {f"./sa_{10 * number + i}.jpg": image, f"./sa_{10 * number + i}.json": b'{"annotations": []}'}
            texts[f"./sa_{10 * number + i}.txt"] = f"The image shows {i}.\n".encode()
        files["links.example", f"sa_{number:06}.tar"] = tar_of(members)
    texts.pop("./sa_30.txt")
    files["PixArt-alpha/SAM-LLaVA-Captions10M", "SA1B_caption.tar.gz"] = tar_of(texts, "w:gz")
    return files


# Of `small`: the files; pictures; rows that come of them; what is left out while captions are sought.
SETS = {
    "cc12m": (cc12m, 10, 9, {}),
    "diffusiondb": (diffusiondb, 8, 4, {"nsfw": 2, "no_caption": 1}),
    "coco-val2014": (coco, 6, 5, {}),
    "textcaps": (textcaps, 6, 4, {"no_caption": 1}),
    "journeydb": (journeydb, 12, 10, {}),
    "sa1b": (sa1b, 15, 13, {"no_caption": 1}),
}
