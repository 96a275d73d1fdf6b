"""README's "Your own pictures", with its own commands, at a few steps."""

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
CAPTIONS = ("a red heart", "蓝色的船", "two boats in the 港口", "una barca")


@pytest.fixture
def pictures(tmp_path):
    """A folder of 12 captioned pictures as people have them: JPEG and PNG, of different sizes."""
    folder = tmp_path / "my_pictures"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(12):
        colours = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        picture = colours.resize((70 + 5 * number, 80), Image.Resampling.BICUBIC)
        picture.save(folder / f"picture {number}.{('jpg', 'png')[number % 2]}")
        (folder / f"picture {number}.txt").write_text(CAPTIONS[number % 4], encoding="utf-8")
    return folder


def walk_through(text: str) -> str:
    """The commands of the section, with few updates."""
    section = text.split("## Your own pictures\n")[1].split("\n## ")[0]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)[1]
    return block.replace("ppldm quickstart", "ppldm quickstart --steps 3 --autoencoder-steps 3")


@pytest.mark.turn("commands lead from a folder to pictures", 1)
@pytest.mark.slow
def test_the_commands_of_the_readme_lead_from_a_folder_to_pictures(tmp_path, pictures, programs):
    environ = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PPLDM_CACHE_DIR": str(tmp_path / "cache"),
        "PPLDM_OFFLINE": "1",
    }
    block = walk_through((ROOT / "README.md").read_text(encoding="utf-8"))
    done = subprocess.run(
        ["bash", "-ec", block], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stderr[-3000:]
    own = tmp_path / "outputs/mine"
    assert (own / "pictures/grid.png").is_file() and list(own.glob("*.yaml"))
    assert len(list((tmp_path / "drawn").glob("000-*.png"))) == 4
