"""`ppldm dataset list | show NAME | get NAME small|all`: data sets of the registry, or of the hub, by one command."""

import shlex
from dataclasses import asdict
from typing import Annotated

from ...utils.errors import ConfigError
from ...utils.files import local_path
from ...utils.log import get_logger
from ...utils.report import print_report
from .entry import SIZES, Entry, find_entry, list_entries


def list_datasets(
    json: bool = False,  # print {name: facts} as JSON
):
    """List the data sets that are known by name."""
    entries = {name: asdict(entry) for name, entry in list_entries().items()}
    print_report(entries, _describe_list, json)


def show(
    name: str,  # of a data set
    json: bool = False,  # print the facts as JSON
):
    """Show what is known of a data set: licence, terms, size, filters, and when that was checked."""
    print_report(asdict(find_entry(name)), _describe_entry, json)


def get(
    name: str,  # of `ppldm dataset list`, or hf:OWNER/NAME for any data set of the Hugging Face hub
    size: Annotated[str, {"choices": SIZES}],  # small, about 1 %, or all
    overrides: Annotated[list, {"opt": False, "nargs": "*", "type": str}] = (),  # of sets of URLs: download.retries=2
    out: Annotated[str, {"opt": True, "required": True}] = "",  # folder for everything; made if missing
    links: str = "",  # the list of links, for sets whose links expire
    files: Annotated[list, {"nargs": "*", "type": str, "opt": True}] = (),  # of hf:OWNER/NAME: patterns of file names
    image_col: str = "",  # of hf:OWNER/NAME: column of the pictures; by default image, jpg, ...
    caption_col: str = "",  # of hf:OWNER/NAME: column of the captions; by default text, caption, ...
    url_col: str = "",  # of hf:OWNER/NAME: column of URLs to download, where there are no pictures
    remove_archives: bool = False,  # remove each archive once its rows are extracted
    precompute: str = "",  # flags of `ppldm precompute`, in quotes, to make latents at the end
    num_workers: int = 0,  # processes; 0 means one per core. The data do not depend on it
    master: str = "",  # a Spark cluster, such as spark://host:7077, whose nodes share --out
    dry_run: bool = False,  # say how many bytes and hours it takes, ask the source, and write nothing
    json: bool = False,  # print the report as JSON instead of text
):
    """Fetch a data set, extract and convert it, and verify every row.

    Pictures of less than 256 pixels are left out, short sides over 512 shrunk to it. Stopped at any point, the same
    command goes on; given twice, it makes the data once. Terms of the data are yours to accept: the command says where.
    """
    from .get import Request, get_dataset, project

    if size not in SIZES:
        raise ConfigError(f"the size is {size!r}; it must be small or all")
    entry = find_entry(name, files, {"image": image_col, "caption": caption_col, "url": url_col})
    if overrides and not entry.pipeline:
        raise ConfigError(f"{overrides[0]} is for sets of URLs, and {name} has pictures; omit it")
    if entry.withdrawn:
        get_logger().warning("%s: %s", name, entry.withdrawn)
    words = tuple(shlex.split(precompute)), tuple(overrides)
    request = Request(entry, size, local_path(out), links, num_workers, master, remove_archives, *words)
    if dry_run:
        print_report(project(request), _describe_projection, json)
        return
    print_report(get_dataset(request), lambda report: _describe_report(report, entry), json)


def _describe_list(entries: dict) -> str:
    lines = [f"{'name':<24}{'rows':>14}{'GB':>8}  what"]
    for name, entry in entries.items():
        size = f"{entry['gigabytes']:,.0f}" if entry["gigabytes"] else ""
        rows = f"{entry['rows']:,}" if entry["rows"] else ""
        lines.append(f"{name:<24}{rows:>14}{size:>8}  {entry['title']}{' (withdrawn)' if entry['withdrawn'] else ''}")
    more = "No number: not published. `ppldm dataset show NAME` says more; hf:OWNER/NAME is any data set of the hub"
    return "\n".join([*lines, more])


def _describe_entry(entry: dict) -> str:
    facts = {
        "what": entry["title"],
        "licence": f"{entry['licence']['name']} ({entry['licence']['page']})",
        "terms to accept": entry["gate"],
        "withdrawn": entry["withdrawn"],
        "rows": f"{entry['rows']:,}" if entry["rows"] else "",
        "rows after the filter": f"{entry['filtered_rows']:,} published" if entry["filtered_rows"] else "",
        "GB": entry["gigabytes"],
        "pipeline": entry["pipeline"],
        "train with": entry["training_flags"],
        "not looked up": entry["unsure"],
        "checked": f"{entry['checked']}, by {'; '.join(entry['facts'])}" if entry["checked"] else "",
    }
    lines = [entry["name"], *(f"{name:<22}{value}" for name, value in facts.items() if value), "files"]
    for source in (*entry["pictures"], *entry["captions"]):
        place = source["hub"] and f"hf:{source['hub']} at {source['revision']}: "
        small = f" (small: {', '.join(source['small'])})" if source["small"] else ""
        lines.append(f"  {place}{', '.join(source['all'])}{small}")
    return "\n".join(lines)


def _describe_projection(plan: dict) -> str:
    rows = f"about {plan['rows']:,} rows, " if plan["rows"] else ""
    room = "" if plan["bytes_free"] > 2 * plan["bytes_left"] else "; the disk has too little room for it and its parts"
    size = f"{plan['bytes_left'] / 1e9:,.2f} GB"
    fetch = (
        f"{plan.get('files_left')} of {plan['files']} file(s) to fetch, {size} in {plan['fetch_hours']} h at the speed"
    )
    fetch = f"{fetch} measured" if "unreachable" not in plan else f"about {size} to fetch, as published"
    why = f"; not asked, {plan['unreachable']}" if "unreachable" in plan else ""
    return (
        f"{rows}{fetch}, {plan['convert_hours']} h to convert; "
        f"{plan['bytes_free'] / 1e9:,.0f} GB are free{room}; nothing was written{why}"
    )


def _describe_report(report: dict, entry: Entry) -> str:
    lines = [f"{report['name']} {report['size']}: {report['files']} file(s), {report['bytes'] / 1e6:,.1f} MB fetched"]
    for stage in ("extracted", "converted", *report.get("stages", ())):
        counts = report.get(stage) or report.get("stages", {}).get(stage)
        if counts:
            left_out = counts.get("skipped", counts.get("dropped", {}))
            lines.append(f"{stage}: {counts['rows_out']:,} of {counts['rows_in']:,} rows")
            lines += [f"  left out, {reason}: {count:,}" for reason, count in left_out.items()]
    if "parts" in report:
        there, parts = report["parts"]
        more = next((number for number in range(1, parts + 1) if number not in there), None)
        told = f"; the same command with download.part_id={more} adds another" if more else ""
        lines.append(f"part {', '.join(map(str, there))} of {parts} is there{told}")
    flags = f" {entry.training_flags}" if entry.training_flags else ""
    return "\n".join([*lines, f"train with --file_list {report['file_list']}{flags}"])
