"""A wheel and a source archive hold the whole package; the wheel works in an empty folder, without the source tree."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.cold

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "README_cn.md", "benchmarks", "data",
           "docs", "examples", "ppldm", "requirements", "run_scripts", "tests")  # fmt: skip


def list_files(folder: Path) -> set[str]:
    """All files below a folder, by their paths in it, without what Python leaves behind."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in paths if "__pycache__" not in path.parts and not path.parts[0].endswith("egg-info")}


def run_python(*command, cwd: Path, **variables) -> str:
    """Run this Python; its output. What it wrote to stderr is the message where it fails."""
    done = subprocess.run([sys.executable, *map(str, command)], cwd=cwd, env={**os.environ, **variables},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def build_wheel(source: Path, out: Path) -> Path:
    """The wheel of a source tree, as `pip wheel` makes it."""
    pip = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run_python(*pip, "--wheel-dir", out, source, cwd=out.parent)
    (wheel,) = out.glob("ppldm-*.whl")
    return wheel


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of the source tree: a build leaves folders in it."""
    folder = tmp_path_factory.mktemp("packaging") / "clone"
    folder.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        keep = {"ignore": shutil.ignore_patterns("__pycache__")} if (ROOT / name).is_dir() else {}
        copy(ROOT / name, folder / name, **keep)
    return folder


@pytest.fixture(scope="module")
def wheel(clone) -> Path:
    return build_wheel(clone, clone.parent / "wheels")


def wheel_files(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("ppldm/")}


def test_a_wheel_holds_every_file_of_the_package(wheel):
    assert wheel_files(wheel) == {f"ppldm/{name}" for name in list_files(ROOT / "ppldm")}
    assert any(name.startswith("ppldm/config/networks/") for name in wheel_files(wheel))


def test_a_source_archive_is_the_source_tree_and_makes_the_same_wheel(clone, wheel):
    run_python("setup.py", "-q", "sdist", "--dist-dir", clone.parent, cwd=clone)
    (archive,) = clone.parent.glob("ppldm-*.tar.gz")
    shutil.unpack_archive(archive, clone.parent / "unpacked")
    (unpacked,) = (clone.parent / "unpacked").iterdir()
    made = {"PKG-INFO", "setup.cfg", "build"}
    assert {name for name in list_files(unpacked) if name.partition("/")[0] not in made} == {
        name for name in list_files(clone) if name.partition("/")[0] not in made
    }
    assert wheel_files(build_wheel(unpacked, clone.parent / "wheels of the archive")) == wheel_files(wheel)


@pytest.fixture(scope="module")
def installed(wheel) -> dict:
    """The variables under which this Python has ppldm from the wheel, before its own installation of the clone."""
    site = wheel.parent / "site"
    run_python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel, cwd=wheel.parent)
    return {"PYTHONPATH": str(site), "PPLDM_CACHE_DIR": str(wheel.parent / "cache")}


def test_the_installed_package_is_the_one_that_runs(installed, tmp_path):
    said = run_python("-c", "import ppldm; print(ppldm.__file__)", cwd=tmp_path, **installed)
    assert said.strip() == f"{installed['PYTHONPATH']}/ppldm/__init__.py"
    assert "usage: ppldm" in run_python("-m", "ppldm", "--help", cwd=tmp_path, **installed)


@pytest.mark.night("a second quickstart, from a wheel")
@pytest.mark.slow
def test_a_wheel_goes_from_nothing_to_pictures_in_an_empty_folder(installed, tmp_path):
    def ppldm(*words) -> str:
        return run_python("-m", "ppldm", *words, cwd=tmp_path, **installed)

    ppldm("demo-data", "--out", "demo", "--subset", "quickstart", "--size", "8", "--limit", "3")
    assert "3 rows" in ppldm("convert", "demo/images", "--out", "converted")
    said = ppldm("quickstart", "--steps", "2")  # with the autoencoder of the wheel
    assert "done before" not in said and f"{ROOT}/ppldm" not in said
    assert (tmp_path / "quickstart/pictures/grid.png").stat().st_size
    # The preset's own paths are those of the quickstart.
    ppldm("train", "--preset", "ldm-tiny-cpu", "--output_dir", "trained", "--max_steps", "2")
    assert (tmp_path / "trained/pipeline/model_index.json").is_file()
    drawn = ("--prompt", "red heart", "--num-samples", "1", "--num-inference-steps", "2")
    ppldm("generate", "--model", "trained/pipeline", *drawn, "--out", "drawn")
    assert len(list((tmp_path / "drawn").glob("000-*.png"))) == 1
