"""Pages that are made: docs/results.md and docs/zh/results.md from benchmarks/results/*.json, docs/api.md from
docstrings, and tables of docs/comparison.md and docs/devices.md.

`python docs/make.py` writes them anew; a test fails where they are not what it writes, so that no figure and no
signature of these pages can differ from its source. A section of the results is a table of the figures of one file,
made by a function here, and the words of docs/results.yaml; the command, the machine and the note of the file are
printed too. A head's cell, and a cell that is a word, is a pair (English, Chinese).
"""

import ast
import inspect
import json
import re
from pathlib import Path

import yaml

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def shapes_world(results):
    scores = results["summary"][0]["scores"]
    rows = []
    for kind, shown in (("single", ("one object", "单个物体")), ("several", ("several objects", "多个物体"))):
        for name in ("colour", "shape", "size", "everything"):
            cells = []
            for seen in ("seen", "held_out"):
                score = scores[f"composition.{seen}.{kind}.{name}"]
                cells += [
                    f"{percent(score['value'])} ({100 * score['low']:.0f} .. {100 * score['high']:.0f})",
                    percent(score["chance"]),
                ]
            rows.append((shown, f"`{name}`", *cells))
    return (
        ("", ""),
        ("attribute", "属性"),
        ("seen", "见过"),
        ("chance", "随机"),
        ("held out", "未见过"),
        ("chance", "随机"),
    ), rows


def loader(results):
    rows = [
        (f"`{one['loader']}`", str(one["cores"]), f"{one['samples_per_second']:.0f}", f"{one['ratio_to_usual']:.1f}")
        for one in results["loaders"]
    ]
    return (
        ("loader", "读取方式"),
        ("cores", "核数"),
        ("samples a second", "样本/秒"),
        ("times the usual", "倍数"),
    ), rows


def train_step(results):
    rows = [
        (
            f"{one['parameters'] / 1e6:.1f} M",
            f"{one['overhead']['ours']['cpu']:.3f}",
            f"{one['overhead']['bare']['cpu']:.3f}",
            percent(one["overhead"]["share"], 1),
            f"{one['settings']['speedup']:.2f}",
            percent(one["data"]["share"], 2),
        )
        for one in results.values()
    ]
    head = (
        *(("parameters", "参数量"), ("ours, s", "ppldm，秒"), ("bare, s", "裸循环，秒"), ("added", "增加")),
        *(("times faster by settings", "设置带来的倍数"), ("waits for data", "等待数据")),
    )
    return head, rows


def latents(results):
    head = (
        ("pixels", "像素"),
        ("from pictures, ms", "从图片，毫秒"),
        ("from latents, ms", "从潜变量，毫秒"),
        ("times", "倍数"),
    )
    return head, [
        (str(one["resolution"]), f"{one['pixels']:.2f}", f"{one['latents']:.3f}", f"{one['ratio']:.0f}")
        for one in results["rows"]
    ]


def latents_step(results):
    head = (("from pictures", "从图片"), ("from latents", "从潜变量"), ("times", "倍数"))
    return head, [(f"{results['pixels']['cpu']:.2f}", f"{results['latents']['cpu']:.2f}", f"{results['ratio']:.2f}")]


def patch_masking(results):
    head = (
        ("network", "网络"),
        ("all patches, ms", "全部图块，毫秒"),
        ("a quarter, ms", "四分之一，毫秒"),
        ("share", "占比"),
    )
    return head, [
        (f"`{name}`", f"{one['ms']:.0f}", f"{one['masked_ms']:.0f}", percent(one["share"]))
        for name, one in results["step"].items()
    ]


def autoencoder(results):
    head = (("loss", "损失"), ("seed", "随机种子"), ("PSNR", "PSNR"), ("SSIM", "SSIM"), ("CPU s", "CPU 秒"))
    return head, [
        (f"`{name}`", str(one["seed"]), f"{one['psnr']:.1f}", f"{one['ssim']:.3f}", f"{one['cpu_seconds']:.0f}")
        for name, runs in results["runs"].items()
        for one in runs
    ]


def buckets(results):
    head = (("`--buckets`", "`--buckets`"), ("shapes", "形状数"), ("cut away", "裁掉"))
    return head, [(name, str(one["shapes"]), percent(one["cut"], 1)) for name, one in results["cut"].items()]


def dedup(results):
    head = (
        *(("pictures", "图片"), ("bits", "位数"), ("precision", "精确率"), ("resized", "缩放")),
        *(("compressed", "压缩"), ("cropped", "裁剪")),
    )
    return head, [
        (one["world"], str(one["bits"]), f"{one['precision']:.3f}")
        + tuple(f"{one['recall'][kind]:.2f}" for kind in ("resized", "compressed", "cropped"))
        for one in results["quality"]
        if not one["mirrored"]
    ]


def select_rows(results):
    head = (("rows", "行数"), ("seconds", "秒"), ("rows a second", "行/秒"), ("main process, MiB", "主进程，MiB"))
    return head, [
        (f"{results['rows']:,}", f"{results['seconds']}", f"{results['rows_per_second']:,}",
         str(results["peak_mib"]["main"]))
    ]  # fmt: skip


def download(results):
    head = (("program", "程序"), ("pictures a second", "图片/秒"), ("CPU s per 1,000", "每 1,000 张的 CPU 秒"))
    return head, [
        (f"`{one['name']}`", f"{one['rows_per_sec']:.0f}", f"{one['cpu_sec_per_1000']:.1f}") for one in results
    ]


def stores(results):
    head = (("", ""), ("pictures a second", "图片/秒"), ("waits for data", "等待数据"))
    return head, [
        (f"`{name}`", f"{results[name]['images_per_second']:.1f}", percent(results[name]["data_wait_share"], 2))
        for name in ("disk", "cold", "warm")
    ]


TABLES = (
    *(shapes_world, loader, train_step, latents, latents_step, patch_masking, autoencoder, buckets, dedup),
    *(select_rows, download, stores),
)


def results_page(language: str) -> str:
    """The page of results in `en` or `zh`."""
    content = yaml.safe_load((DOCS / "results.yaml").read_text(encoding="utf-8"))
    head = content["head"][language]
    command, machine, note, busy, cores = head["words"]
    up = "../" if language == "zh" else ""
    tables = {table.__name__: table for table in TABLES}
    parts = [f"# {head['title']}", head["text"], head["picture"]]
    for section in content["sections"]:
        record = json.loads((ROOT / f"benchmarks/results/{section['figures']}.json").read_text(encoding="utf-8"))
        title, text = _split(section[language])
        columns, rows = tables[section["table"]](record["results"])
        index = ("en", "zh").index(language)
        table = [[column[index] for column in columns], ["---"] * len(columns)]
        table += [[cell[index] if isinstance(cell, tuple) else cell for cell in row] for row in rows]
        parts += [f"## {title}", text] if text else [f"## {title}"]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in table))
        if "picture" in section:
            parts.append(f"![{title}]({up}images/{section['picture']})")
        where = record["machine"]
        load = f", {busy}" if where["busy"] else ""
        facts = [f"{command}: `{record['command']}`"]
        facts.append(f"{machine}: {where['processor']}, {where['cores']} {cores}{load}, {record['date'][:10]}")
        facts += [f"{note}: {record['note']}"] if record["note"] else []
        parts.append("\n".join(f"- {fact}" for fact in facts))
    return "\n\n".join(parts) + "\n"


def _split(text: str) -> tuple[str, str]:
    """The first sentence, without its full stop, and the rest."""
    mark = "。" if "。" in text else ". "
    first, found, rest = text.partition(mark)
    return (first, rest.strip()) if found else (text.rstrip("."), "")


# Whose public names make the page of the API: what a script of one's own would import.
MODULES = (
    *("ppldm", "ppldm.inference.load", "ppldm.inference.pipeline", "ppldm.diffusion.drawing", "ppldm.config.load"),
    *("ppldm.config.recipe", "ppldm.data.filelist"),
    *("ppldm.data.formats.open", "ppldm.data.cached.latents", "ppldm.families.base", "ppldm.networks.model"),
    *("ppldm.diffusion.process", "ppldm.diffusion.weighting", "ppldm.diffusion.samplers", "ppldm.utils.rng"),
    "ppldm.utils.errors",
)


def api_page() -> str:
    """The public functions and classes of `MODULES`, with signatures and docstrings, read without importing them."""
    parts = [
        "# API",
        "What a script of your own may import. Made from the docstrings by `python docs/make.py`. Most people need "
        "`ppldm.load` alone ([weights.md](weights.md)); [extending.md](extending.md) says how to add a family or a "
        "format. Whatever is not listed may change without notice.",
    ]
    for module in MODULES:
        path = ROOT / (module.replace(".", "/") + ".py")
        tree = ast.parse((path if path.exists() else path.with_suffix("") / "__init__.py").read_text(encoding="utf-8"))
        parts.append(f"## {module}")
        parts += _docstring(tree)
        for node in tree.body:
            parts += _described(node, "")
    return "\n\n".join(parts) + "\n"


def _described(node: ast.stmt, prefix: str) -> list[str]:
    """A public function, or a class with its public methods; of anything else nothing."""
    if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
        return []
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        inner = [text for child in node.body for text in _described(child, f"{node.name}.")]
        return [f"### class `{node.name}{f'({bases})' if bases else ''}`", *_docstring(node), *inner]
    if prefix and not ast.get_docstring(node):
        return []
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    is_property = any(ast.unparse(mark).endswith("property") for mark in node.decorator_list)
    arguments = "" if is_property else f"({re.sub(r'^self(, )?', '', ast.unparse(node.args))})"
    return [f"{'####' if prefix else '###'} `{prefix}{node.name}{arguments}{returned}`", *_docstring(node)]


def _docstring(node) -> list[str]:
    text = ast.get_docstring(node)
    return [inspect.cleandoc(text).replace("<", "&lt;")] if text else []


def comparison_page(name: str) -> str:
    """A page of the comparison with the table of what was measured beside others between its marks."""
    text = (DOCS / name).read_text(encoding="utf-8")
    record = json.loads((ROOT / "benchmarks/results/loader.json").read_text(encoding="utf-8"))
    heads = {"comparison.md": "| what | loader | cores | samples a second | command |"}
    rows = [heads.get(name, "| 什么 | 读取方式 | 核数 | 样本/秒 | 命令 |"), "| --- | --- | --- | --- | --- |"]
    photographs, usual = MEASURED["zh" if name.startswith("zh") else "en"]
    rows += [
        f"| {photographs}, {one['resolution']} px "
        f"| {usual if one['loader'] == 'usual' else one['loader']} | {one['cores']} "
        f"| {one['samples_per_second']:.0f} | `{record['command']}` |"
        for one in record["results"]["loaders"]
    ]
    head, mark, rest = text.partition("<!-- measured -->\n")
    return head + mark + "\n".join(rows) + "\n" + rest[rest.index("<!-- end -->") :]


MEASURED = {
    "en": ("photographs made ready for training", "the steps of PaddleMIX's LDM example, written anew"),
    "zh": ("处理照片以供训练", "按 PaddleMIX 的 LDM 示例的步骤重写"),
}


def devices_page(name: str) -> str:
    """A page of devices with the kinds of them, and who has certified which, between its marks."""
    from ppldm.utils.machine.devices import KINDS

    chinese = name.startswith("zh")
    kinds = [
        "| `--device` | 设备 | 可见设备 | 进程间通信 | 设定 | 飞桨包 |"
        if chinese
        else "| `--device` | what | limited by | ranks talk by | set | Paddle |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kind in KINDS.values():
        settings = " ".join(f"`{key}={value}`" for key, value in kind.settings.items())
        package = f"`{kind.package}`" + (f" {kind.version} +" if kind.plugin else "")
        visible = ", ".join(f"`{key}`" for key in kind.visible)
        words = MAKERS.get(kind.name, kind.words) if chinese else kind.words
        kinds.append(f"| `{kind.name}` | {words} | {visible} | {kind.collective} | {settings} | {package} |")
    rows = [
        "| 设备 | 验证者 | 日期 | 版本 | 运算 | 最大差：前向，梯度 | 半精度 | 续训 |"
        if chinese
        else "| device | by | when | with | operations | worst: forward, gradient | half precision | resumed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    none, of_all, equal, unequal = (
        ("无", "/", "逐位相同", "不同") if chinese else ("none", " of ", "equal to the bit", "not equal")
    )
    for path in sorted((ROOT / "benchmarks/results/certified").glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        of, versions, device = report["operations"], report["versions"], report["device"]
        worst = [max(one.get(key, float("inf")) for one in of) for key in ("forward", "gradient")]
        paddle = [f"{key} {version}" for key, version in versions.items() if re.match("paddle(?!nlp)", key)]
        cells = [
            f"{device['name']}: {device['model']}",
            report["by"],
            report["date"][:10],
            f"ppldm {versions['ppldm']}, {', '.join(paddle)}",
            f"{sum(one['ok'] for one in of)}{of_all}{len(of)}",
            ", ".join(f"{one:.1e}" for one in worst),
            ", ".join(key for key, found in report["half_precision"].items() if found) or none,
            equal if report["resume"]["equal"] else unequal,
        ]
        rows.append(f"| {' | '.join(cells)} |")
    text = (DOCS / name).read_text(encoding="utf-8")
    for mark_name, table in (("kinds", kinds), ("certified", rows)):
        head, mark, rest = text.partition(f"<!-- {mark_name} -->\n")
        text = head + mark + "\n".join(table) + "\n" + rest[rest.index("<!-- end -->") :]
    return text


# What the kinds of devices are called in Chinese.
MAKERS = {
    **{"cpu": "CPU", "gpu": "英伟达 GPU", "dcu": "海光 DCU", "xpu": "昆仑芯 XPU", "npu": "昇腾 NPU"},
    **{"mlu": "寒武纪 MLU", "gcu": "燧原 GCU", "metax_gpu": "沐曦 GPU"},
}


PAGES = {
    "results.md": lambda: results_page("en"),
    "zh/results.md": lambda: results_page("zh"),
    "api.md": api_page,
    "comparison.md": lambda: comparison_page("comparison.md"),
    "zh/comparison.md": lambda: comparison_page("zh/comparison.md"),
    "devices.md": lambda: devices_page("devices.md"),
    "zh/devices.md": lambda: devices_page("zh/devices.md"),
}


# Hooks of mkdocs (mkdocs.yml): the READMEs become two pages of the site, and links to them lead there.
READMES = {"quickstart.md": ("README.md", ""), "zh/quickstart.md": ("README_cn.md", "../")}


def on_files(files, config):
    from mkdocs.structure.files import File

    for page, (readme, up) in READMES.items():
        text = (ROOT / readme).read_text(encoding="utf-8")
        text = re.sub(r"\[([^]]+)\]\((?!docs/|README|http|#)[^)]*\)", r"`\1`", text)  # files that are not pages
        text = text.replace("](README.md)", "](../quickstart.md)").replace("](README_cn.md)", "](zh/quickstart.md)")
        files.append(File.generated(config, page, content=text.replace("](docs/", f"]({up}")))
    return files


def on_page_markdown(markdown, page, **_):
    return re.sub(r"\]\((?:\.\./)+README(?:_cn)?\.md", "](quickstart.md", markdown)


if __name__ == "__main__":
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
