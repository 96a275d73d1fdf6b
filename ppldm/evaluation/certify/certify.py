"""`ppldm certify`: does a device compute what the CPU computes, and go on where it stopped? One file that says so."""

from ...utils.entry import entry
from ...utils.errors import EnvironmentProblem
from ...utils.files import local_path, write_json
from ...utils.machine.devices import DEFAULT_DEVICE, parse_device
from ...utils.text import print_report

FORMAT = 1


def certify(
    device: str = DEFAULT_DEVICE,  # what to certify, as --device of train: auto, cpu, gpu, npu …, gpu:1
    out: str = None,  # the file to write; by default certified-<device>.json
    by: str = "",  # who certifies it, as it is shown in docs/devices.md
    resume: bool = True,  # also train, go on from the middle and compare to the bit (--no-resume does not)
    json: bool = False,  # print the whole report as JSON
):
    """Compare a device with the CPU, operation by operation, and write one file with what was found."""
    parse_device(device)
    with entry():
        from .report import describe, make_report

        report = {"format": FORMAT, "by": by, **make_report(device, resume)}
        path = local_path(out or f"certified-{report['device']['name'].replace(':', '-')}.json")
        write_json(path, report)
        print_report(report, describe, json)
        if not report["passed"]:
            raise EnvironmentProblem(f"{report['device']['name']} is not certified: see {path}")
