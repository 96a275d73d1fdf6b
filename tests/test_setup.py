"""setup.py, the lock and the table of `ppldm env` say the same; the scripts parse, find a Python and stop."""

import os
import runpy
import select
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from ppldm.utils.machine import devices
from ppldm.utils.machine.environment import KNOWN_BAD, PINS, check_python

pytestmark = pytest.mark.cold

ROOT = Path(__file__).resolve().parents[1]
LOCKED_EXTRAS = ("cpu", "demo", "test")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


@pytest.fixture(scope="module")
def declared():
    """The arguments that setup.py gives to setuptools.setup."""
    arguments = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", arguments.update)
        runpy.run_path(str(ROOT / "setup.py"))
    return arguments


def lock_for(python: str) -> dict[str, str]:
    """Package to version, for one Python on Linux. Fails on a line that is no exact pin, or pins twice."""
    target = {"python_version": python, "python_full_version": f"{python}.5", "sys_platform": "linux"}
    versions = {}
    for line in (ROOT / "requirements/lock.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        requirement = Requirement(line)
        (pin,) = requirement.specifier
        assert pin.operator == "==" and not requirement.extras and not requirement.url, line
        if requirement.marker is None or requirement.marker.evaluate(target):
            assert requirement.name not in versions, line
            versions[requirement.name] = pin.version
    return versions


@pytest.mark.parametrize("python", PYTHONS)
def test_lock_satisfies_setup(declared, python):
    lock = lock_for(python)
    wanted = declared["install_requires"] + [r for extra in LOCKED_EXTRAS for r in declared["extras_require"][extra]]
    for requirement in map(Requirement, wanted):
        version = lock[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} but {version} is locked"


def test_each_place_admits_the_same_pythons(declared):
    for minor in range(8, 17):
        version = f"3.{minor}"
        is_supported = version in PYTHONS
        assert (f"{version}.5" in SpecifierSet(declared["python_requires"])) == is_supported, version
        assert (check_python((3, minor)) is None) == (version in devices.CPU.pythons) == is_supported, version
    ends = ["({}, {})".format(*version.split(".")) for version in (PYTHONS[0], PYTHONS[-1])]
    assert f"{ends[0]} <= sys.version_info[:2] <= {ends[1]}" in (ROOT / "run_scripts/lib.sh").read_text()
    proof = (ROOT / "run_scripts/proof.sh").read_text()
    assert f"PYTHON_VERSIONS=({' '.join(PYTHONS)})" in proof and f"ENDS=({PYTHONS[0]} {PYTHONS[-1]})" in proof
    night = (ROOT / ".github/workflows/night.yml").read_text().split()
    assert {word for word in night if word.startswith("3.")} == set(PYTHONS)


@pytest.mark.parametrize("python", PYTHONS)
def test_lock_leaves_out_what_needs_more_than_a_slim_machine(python):
    assert not {"opencv-python", "ligo-segments", "torch", "paddlepaddle-gpu"} & lock_for(python).keys()


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("beyond", ["wandb", "comet", "engine", "parity"])
def test_what_is_beyond_the_lock_pins_nothing_of_it_again(beyond, python):
    lines = (ROOT / f"requirements/{beyond}.txt").read_text().splitlines()
    names = {canonicalize_name(Requirement(line).name) for line in lines if not line.startswith("#")}
    assert names and not names & lock_for(python).keys()


def test_every_extra_is_declared(declared):
    assert declared["extras_require"].keys() == {
        *("cpu", "gpu", "data", "demo", "tensorboard", "wandb", "comet", "s3", "engine", "test", "parity")
    }
    pinned = (ROOT / "requirements/engine.txt").read_text().splitlines()[-1]
    assert declared["extras_require"]["engine"] == [pinned]
    for path in ("ppldm/networks/engine.py", "docs/weights.md"):
        assert f"pip install {pinned}" in (ROOT / path).read_text(), path
    assert declared["entry_points"]["console_scripts"] == ["ppldm = ppldm.__main__:main"]


@pytest.mark.parametrize("python", PYTHONS)
def test_setup_excludes_what_env_calls_broken_and_admits_what_it_pins(declared, python):
    extras = declared["extras_require"]
    bounds = {canonicalize_name(r.name): r.specifier for r in map(Requirement, declared["install_requires"])}
    bounds |= {r.name: r.specifier for r in map(Requirement, extras["cpu"] + extras["gpu"])}
    lock = lock_for(python)
    for name, pin in PINS.items():
        assert lock[name] in SpecifierSet(pin, prereleases=True), name
    for package, versions, _ in KNOWN_BAD:
        for bad in SpecifierSet(versions):
            assert bad.operator == "<" or not bounds[package].contains(bad.version, prereleases=True), package


@pytest.mark.parametrize(
    "script", sorted((ROOT / "run_scripts").rglob("*.s[hb]*")) + [ROOT / ".ci/run"], ids=lambda p: p.name
)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", script], check=True)


def test_scripts_that_are_typed_after_sh_go_on_in_bash():
    """Recipes write `sh laion_download_imgs.sh 1`, and sh is dash on Debian and Ubuntu."""
    scripts = sorted((ROOT / "run_scripts").rglob("*.sh"))
    typed = {path: text.splitlines() for path in scripts if (text := path.read_text()).startswith("#!")}
    assert [
        path.name for path, lines in typed.items() if lines[1] != '[ -n "$BASH_VERSION" ] || exec bash "$0" "$@"'
    ] == []
    shell = shutil.which("dash") or "sh"
    status, _, stderr = run_script(shell, ROOT / "run_scripts/laion_download_imgs.sh", PYTHON="/bin/false")
    assert status == 2 and "which part?" in stderr and len(typed) > 5


def run_script(*command, **variables):
    """Run a command with the given changes of the environment; its exit status, stdout and stderr."""
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


QUICKSTART, SETUP = ROOT / "run_scripts/quickstart.sh", ROOT / "run_scripts/setup.sh"


def test_dry_run_prints_the_commands_and_does_nothing(tmp_path):
    venv, out = tmp_path / "venv", tmp_path / "out"
    variables = {"PPLDM_VENV": str(venv), "PYTHON": sys.executable}
    status, stdout, _ = run_script("bash", QUICKSTART, "--dry-run", "--steps", "7", "--out", out, **variables)
    assert status == 0
    assert not venv.exists() and not out.exists()
    commands = [line for line in stdout.splitlines() if not line.startswith("#")]
    assert str(out) in commands[-1] and "--max_steps 7" in commands[-3]
    setup = run_script("bash", SETUP, "--dry-run", **variables)[1]
    assert commands[:-4] == [line for line in setup.splitlines() if not line.startswith("#")]


def test_the_folder_of_the_script_is_that_of_the_clone(tmp_path):
    variables = {"PPLDM_VENV": str(tmp_path / "venv"), "PYTHON": sys.executable}
    done = subprocess.run(["bash", QUICKSTART, "--dry-run"], cwd=tmp_path, env={**os.environ, **variables},
                          capture_output=True, text=True)  # fmt: skip
    assert f"--out {ROOT}/quickstart/pictures " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--setps", "3"], "unknown flag --setps; did you mean --steps?"),
        (["--steps", "many"], "whole number"),
        (["--steps"], "--steps: expected one argument"),
    ],
)
def test_quickstart_refuses_bad_flags_in_one_line_before_it_installs_anything(tmp_path, arguments, words):
    variables = {"PPLDM_VENV": str(tmp_path / "venv"), "PYTHON": sys.executable}
    status, _, stderr = run_script("bash", QUICKSTART, *arguments, **variables)
    assert status == 2 and words in stderr and stderr.count("\n") == 1
    assert not (tmp_path / "venv").exists()


def test_no_fitting_python_names_the_versions_and_the_remedy(tmp_path):
    for tool in ("bash", "dirname", "cat", "df", "awk", "mkdir"):
        (tmp_path / tool).symlink_to(Path("/bin", tool) if Path("/bin", tool).exists() else Path("/usr/bin", tool))
    variables = {"PATH": str(tmp_path), "PPLDM_VENV": str(tmp_path / "venv"), "PYTHON": ""}
    status, _, stderr = run_script("bash", ROOT / "run_scripts/test.sh", **variables)
    assert status == 1 and "3.10 to 3.13" in stderr and "apt install" in stderr
    status, _, stderr = run_script("bash", ROOT / "run_scripts/test.sh", **{**variables, "PYTHON": "/bin/false"})
    assert status == 1 and "PYTHON=/bin/false" in stderr


@pytest.fixture
def fake_run(tmp_path):
    """A copy of the scripts whose environment is ready-made: its `python` notes its arguments."""
    root, venv = tmp_path / "repo", tmp_path / "venv"
    (root / "requirements").mkdir(parents=True)
    (root / "run_scripts").mkdir()
    (venv / "bin").mkdir(parents=True)
    for name in (
        "setup.py",
        "requirements/lock.txt",
        "requirements/lock-gpu.txt",
        "run_scripts/lib.sh",
        "run_scripts/quickstart.sh",
    ):
        (root / name).write_text((ROOT / name).read_text())
    (root / "ppldm").symlink_to(ROOT / "ppldm")
    python = venv / "bin/python"
    python.write_text(
        f"""#!/usr/bin/env bash
if [[ $1 == --version || $1 == -c ]]; then exit 0; fi
if [[ $* == *--dry-run ]]; then exec {sys.executable} "$@"; fi
echo "$@" >>{tmp_path}/calls
"""
    )
    python.chmod(0o755)
    variables = {**os.environ, "PPLDM_VENV": str(venv)}
    (venv / "ppldm.device").write_text("cpu\n")
    stamp = subprocess.run(
        ["bash", "-c", f"source {root}/run_scripts/lib.sh; decide_device; environment_stamp"],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    (venv / "ppldm.stamp").write_text(stamp.stdout)
    return tmp_path, ["bash", str(root / "run_scripts/quickstart.sh"), "--steps", "7"], variables


def calls(folder):
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_the_script_runs_the_command_in_the_environment(fake_run):
    folder, command, variables = fake_run
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert calls(folder)[-1] == f"-m ppldm.demo.quickstart --out {folder}/repo/quickstart --steps 7"


@pytest.mark.parametrize("lines", [24, 60, 190])
def test_no_more_packages_are_counted_than_there_are(lines):
    program = f"source {ROOT}/run_scripts/lib.sh; show_progress 150"
    text = "".join(f"Collecting package-{number}\n" for number in range(lines))
    done = subprocess.run(["bash", "-c", program], input=text, capture_output=True, text=True)
    shown = [f"    {number} of about 150 packages fetched" for number in range(25, min(lines, 150) + 1, 25)]
    assert done.stderr.splitlines() == shown


def test_each_step_of_pip_is_told_when_it_begins():
    program = f"source {ROOT}/run_scripts/lib.sh; show_progress 150"
    with subprocess.Popen(["bash", "-c", program], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as shown:
        for line, told in [
            ("+ pip install a", "    pip install a"),
            ("Building wheels for collected packages: a", "    building the packages that have no wheel"),
            ("Installing collected packages: a", "    unpacking 1 package"),
            ("Installing collected packages: a, b, c", "    unpacking 3 packages"),
            (
                f"Installing collected packages: {', '.join('a' * 170)}",
                "    unpacking 170 packages: 1 to 2 minutes, 15 where the machine is busy; no other line until then",
            ),
            ("ERROR: no space", "    ERROR: no space"),
        ]:
            print(line, file=shown.stdin, flush=True)
            assert select.select([shown.stderr], [], [], 120)[0], f"nothing is told of {line}"
            assert shown.stderr.readline() == f"{told}\n"
        shown.stdin.close()


def test_sizes_of_uv_are_summed_up_and_each_step_is_told():
    program = f"source {ROOT}/run_scripts/lib.sh; show_progress 150"
    text = """Resolved 5 packages in 24ms
Resolved 181 packages in 1.31s
Downloading paddle (185.8MiB)
Downloading tiny (1.3MiB)
   Building seq==1.2.2
Downloading arrow (40.2MiB)
      Built seq==1.2.2
 Downloaded tiny
 Downloaded paddle
 Downloaded arrow
Prepared 175 packages in 33.04s
Installed 176 packages in 796ms
Bytecode compiled 15755 files in 27.24s
   Building ppldm @ file:///clone
error: no space
  cause: disk
"""
    done = subprocess.run(["bash", "-c", program], input=text, capture_output=True, text=True)
    assert [line.removeprefix("    ") for line in done.stderr.splitlines()] == [
        "fetching what uv's cache lacks of 181 packages",
        "fetching the source of seq==1.2.2 and building it",
        "186 of 226 MiB of large wheels fetched",
        "226 of 226 MiB of large wheels fetched; building and unpacking: up to 2 minutes, 10 where the machine is busy",
        "fetched and unpacked 175 packages in 33.04s",
        "installed 176 packages in 796ms",
        "compiling them: up to a minute, 10 where the machine is busy",
        "compiled 15755 files in 27.24s",
        "error: no space",
        "  cause: disk",
    ]


@pytest.fixture
def install_here(tmp_path):
    """Install into an environment whose Python notes what it is asked; it fails on what matches `fails`, a pattern."""
    root, venv = tmp_path / "clone", tmp_path / "venv"
    shutil.copytree(ROOT / "requirements", root / "requirements")
    shutil.copytree(ROOT / "run_scripts", root / "run_scripts")
    shutil.copy(ROOT / "setup.py", root)
    (root / "ppldm").symlink_to(ROOT / "ppldm")
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").touch()
    python = venv / "bin/python"
    own = tmp_path / "tools/python3"  # this very Python, without the uv that may lie beside it
    own.parent.mkdir()
    own.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    own.chmod(0o755)

    def install(fails="^$", **variables):
        python.write_text(
            f"""#!/bin/bash
[[ $2 != uv && $2 != pip || $3 == --version ]] && exit
echo "${{UV_DEFAULT_INDEX:-}} $*" >>{tmp_path}/calls
if [[ "$*" =~ {fails} ]]; then echo "error: that fails"; exit 1; fi
"""
        )
        python.chmod(0o755)
        (tmp_path / "calls").unlink(missing_ok=True)
        given = {
            "PATH": f"{tmp_path}/tools:/usr/bin:/bin",
            "HOME": str(tmp_path),
            "PPLDM_VENV": str(venv),
            "PIP_CONFIG_FILE": os.devnull,
        }
        done = subprocess.run(["bash", root / "run_scripts/setup.sh", "--device", "cpu"], env=given | variables,
                              capture_output=True, text=True)  # fmt: skip
        return done, calls(tmp_path)

    install.venv = venv
    return install


def test_uv_installs_and_pip_brings_it(install_here):
    done, asked = install_here()
    assert done.returncode == 0, done.stderr
    assert [words.split()[1] for words in asked] == ["pip", "uv", "uv", "uv"] and "requirements/uv.txt" in asked[0]


@pytest.mark.parametrize("fails", ["requirements/uv.txt", "uv.*setuptools-scm", "uv.*--requirement", "uv.*--editable"])
def test_where_uv_fails_pip_goes_on_with_all_of_it(install_here, fails):
    done, asked = install_here(fails)
    assert done.returncode == 0 and "uv failed (log: " in done.stderr and "going on with pip" in done.stderr
    by_pip = [words for words in asked if words.split()[1] == "pip" and "uv.txt" not in words]
    assert [words.split()[-2].rpartition("/")[2] for words in by_pip] == ["setuptools", "--requirement", "--editable"]
    log = (install_here.venv / "install.log").read_text()
    assert log.index("that fails") < log.index(
        f"+ {install_here.venv}/bin/python -m pip install", log.index("that fails")
    )


def test_where_pip_fails_too_the_remedy_is_named_and_nothing_counts_as_ready(install_here):
    done, _ = install_here("--requirement.*lock.txt")
    assert done.returncode == 1 and "PIP_INDEX_URL" in done.stderr.splitlines()[-1]
    assert not (install_here.venv / "ppldm.stamp").exists()
    done, asked = install_here(
        "--requirement.*lock.txt", PIP_NO_INDEX="1"
    )  # which uv has no counterpart of: pip tries it once
    assert done.returncode == 1 and "uv failed" not in done.stderr
    assert "by pip: uv has no counterpart of pip's setting no-index" in done.stderr
    assert [words.split()[1] for words in asked if words.endswith("lock.txt")] == ["pip"]


def test_a_mirror_reaches_uv_and_its_password_no_screen_and_no_log(install_here):
    mirror = "https://me:secret@mirror.example/simple"
    done, asked = install_here(PIP_INDEX_URL=mirror)
    assert done.returncode == 0 and all(words.startswith(mirror) for words in asked)
    log = (install_here.venv / "install.log").read_text()
    for said in (done.stdout, done.stderr, log):
        assert "secret" not in said
    assert "export UV_DEFAULT_INDEX=https://****@mirror.example/simple" in log
    (install_here.venv / "ppldm.stamp").unlink()
    command = ["bash", ROOT / "run_scripts/setup.sh", "--dry-run"]
    shown = run_script(*command, PIP_INDEX_URL=mirror, PPLDM_VENV=str(install_here.venv))[1]
    assert "UV_DEFAULT_INDEX=https://****@mirror.example/simple" in shown


def test_what_was_half_unpacked_is_installed_anew(install_here):
    packages = install_here.venv / "lib/python3.11/site-packages"
    for name in ("whole-1.0.dist-info", "half-1.0.dist-info"):
        (packages / name).mkdir(parents=True)
        (packages / name / "METADATA").touch()
    (packages / "whole-1.0.dist-info/INSTALLER").touch()
    assert install_here()[0].returncode == 0
    assert [path.name for path in packages.iterdir()] == ["whole-1.0.dist-info"]


def test_the_device_is_said_once(tmp_path):
    program = f"source {ROOT}/run_scripts/lib.sh; decide_device; decide_device; echo $DEVICE; decide_device --look"
    done = subprocess.run(["bash", "-c", program], env={**os.environ, "PPLDM_VENV": str(tmp_path / "venv")},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0 and done.stderr.count(f"==> {done.stdout.strip()}: ") == 2  # --look looks again


@pytest.fixture
def machine_with(tmp_path):
    """Make a machine: the variables under which nvidia-smi (a stand-in, or none) shows what is given, and no .venv."""

    def make(driver=None, capabilities=(), broken=False):
        folder = tmp_path / "bin"
        folder.mkdir()
        for tool in ("bash", "dirname", "cat", "grep", "sort", "wc", "sed", "sha256sum", "nproc"):
            (folder / tool).symlink_to(shutil.which(tool))
        if driver or broken:
            program = folder / "nvidia-smi"
            program.write_text(NVIDIA_SMI.format(driver=driver, cards=" ".join(capabilities), broken=broken))
            program.chmod(0o755)
        return {"PATH": str(folder), "PPLDM_VENV": str(tmp_path / "venv"), "PYTHON": sys.executable}

    return make


# What nvidia-smi prints for the two questions that ppldm asks; before driver 510 it did not know compute_cap.
NVIDIA_SMI = """#!/usr/bin/env bash
if [[ {broken} == True ]]; then echo "NVIDIA-SMI has failed because it could not reach the driver."; exit 9; fi
driver={driver}
for card in {cards}; do
    case $* in
        *compute_cap*)
            if ((${{driver%%.*}} < 510)); then echo 'Field "compute_cap" is not a valid field to query.'; exit 2; fi
            echo "NVIDIA Card, 32768 MiB, $driver, $card" ;;
        *) echo "NVIDIA Card, 32768 MiB, $driver" ;;
    esac
done
"""


@pytest.mark.parametrize(
    ("driver", "cards", "build"),
    [
        ("550.54.14", ["7.0"], "cu126"),
        ("580.65.06", ["8.0", "9.0"], "cu126"),
        ("570.86.10", ["12.0"], "cu129"),
        ("575.51.03", ["8.6", "12.0"], "cu129"),
        ("535.183.01", ["8.0"], "cu118"),
        ("470.82.01", ["7.5"], "cu118"),
    ],
)
def test_a_machine_with_gpus_gets_the_build_that_they_run(machine_with, driver, cards, build):
    status, stdout, stderr = run_script("bash", SETUP, "--dry-run", **machine_with(driver, cards))
    assert status == 0, stderr
    index = f"--index-url https://www.paddlepaddle.org.cn/packages/stable/{build}/"
    assert sum(index in line and "paddlepaddle-gpu==3.3.1" in line for line in stdout.splitlines()) == 1
    assert "requirements/lock-gpu.txt" in stdout and f"driver {driver}" in stderr


@pytest.mark.parametrize("broken", [False, True])
def test_a_machine_without_a_gpu_that_works_gets_the_lock(machine_with, broken):
    status, stdout, stderr = run_script("bash", SETUP, "--dry-run", **machine_with(broken=broken))
    assert status == 0 and "shows no GPU" in stderr
    assert "requirements/lock.txt" in stdout and "paddlepaddle" not in stdout


@pytest.mark.parametrize("cuda", ["11.8", "12.6", "12.9", "13.0"])
def test_a_build_can_be_asked_for_where_there_is_no_gpu_to_see(machine_with, cuda):
    status, stdout, stderr = run_script("bash", SETUP, "--dry-run", "--device", "gpu", f"--cuda={cuda}",
                                        **machine_with())  # fmt: skip
    assert status == 0 and f"/stable/cu{cuda.replace('.', '')}/" in stdout and "not checked" in stderr


@pytest.mark.parametrize(
    ("flags", "driver", "words"),
    [
        (["--cuda", "12.5"], None, "11.8, 12.6, 12.9, 13.0"),
        (["--device", "tpu"], None, "choose cpu, gpu, dcu, xpu"),
        (["--device", "cpu", "--cuda", "12.6"], None, "omit one"),
        (["--cuda", "13.0"], "550.54.14", "needs 580.65.06 or newer"),
        ([], "390.48", "needs 450.80.02 or newer"),
        (["--cdua", "12.6"], None, "unknown flag --cdua"),
        (["--cuda"], None, "--cuda needs a value"),
    ],
)
def test_what_setup_cannot_do_is_refused_in_one_line(machine_with, flags, driver, words):
    status, stdout, stderr = run_script("bash", SETUP, "--dry-run", *flags, **machine_with(driver, ["8.0"]))
    assert status != 0 and words in stderr and stderr.startswith("error: ") and stderr.count("\n") == 1
    assert "pip install" not in stdout


def test_what_was_chosen_is_kept_by_the_other_scripts(fake_run):
    folder, command, variables = fake_run
    (folder / "venv/ppldm.device").write_text("cu126\n")
    planned = subprocess.run([*command, "--dry-run"], env=variables, capture_output=True, text=True, check=True).stdout
    assert "# the environment, for cu126" in planned and "/stable/cu126/" in planned
    assert "launch" not in planned and "--per_device_train_batch_size 16" in planned  # one process, as on a CPU


def test_an_environment_of_another_python_is_not_used_silently(fake_run):
    folder, command, variables = fake_run
    python = folder / "venv/bin/python"
    python.write_text(
        python.read_text().replace(
            "if [[ $1 == --version",
            "if [[ $2 == *base_prefix* ]]; then\necho 3.10.1 in /elsewhere; exit; fi\nif [[ $1 == --version",
        )
    )
    done = subprocess.run(command, env={**variables, "PYTHON": sys.executable}, capture_output=True, text=True)
    assert done.returncode == 1 and "was made with Python 3.10.1 in /elsewhere" in done.stderr
    assert sys.executable in done.stderr and done.stderr.count("\n") == 1 and calls(folder) == []


@pytest.mark.parametrize("script", ["quickstart.sh", "setup.sh", "test.sh"])
def test_help_installs_nothing(machine_with, tmp_path, script):
    status, stdout, stderr = run_script("bash", ROOT / "run_scripts" / script, "--help", **machine_with())
    assert status == 0 and stdout.startswith("usage: ") and f"bash run_scripts/{script}" in stdout and not stderr
    assert not (tmp_path / "venv").exists()


def test_a_clone_does_not_shadow_the_package_in_its_parent_folder(tmp_path):
    clone, site = tmp_path / "work/ppldm", tmp_path / "site"
    clone.mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    shutil.copytree(ROOT / "ppldm", clone / "ppldm", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "setup.py", "-q", "editable_wheel", "--dist-dir", tmp_path], cwd=clone, check=True,
                   capture_output=True)  # fmt: skip
    (wheel,) = tmp_path.glob("ppldm-*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    program = f"import site; site.addsitedir({str(site)!r}); import ppldm; print(ppldm.__file__, ppldm.__all__)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for folder in (clone.parent, clone, tmp_path):
        # -S: without the packages of this Python, among them an installation of ppldm.
        done = subprocess.run([sys.executable, "-S", "-c", program], cwd=folder, env=environment, capture_output=True,
                              text=True)  # fmt: skip
        assert done.stdout == f"{clone}/ppldm/__init__.py ['load']\n", (folder, done.stderr)


SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_NODEID=1
exec "$@"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf 'alpha\\nbeta\\n'; else echo "$@" > "$SAID/requeue"; fi
"""
TRAINING = """echo "$MASTER $NNODES $NODE_RANK $*" > "$SAID/started"; exit "$STATUS"
"""


@pytest.mark.parametrize("status", [0, 2, 75])
def test_a_slurm_job_is_queued_again_where_training_was_stopped(tmp_path, status):
    # Stand-ins for Slurm's own programs, which no machine for tests has.
    for name, text in {"bin/srun": SRUN, "bin/scontrol": SCONTROL, "run_scripts/mine.sh": TRAINING}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    result = subprocess.run(
        ["bash", ROOT / "run_scripts/slurm/train.sbatch", "--recompute", "--x", "a b"],
        env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SAID": str(tmp_path), "STATUS": str(status),
             "SCRIPT": "mine.sh", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "alpha,beta",
             "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (tmp_path / "started").read_text() == "alpha:20007 2 1 --recompute --x a b\n"
    if status == 75:
        assert (tmp_path / "requeue").read_text() == "requeue 7\n"
    else:
        assert result.returncode == status and not (tmp_path / "requeue").exists()
