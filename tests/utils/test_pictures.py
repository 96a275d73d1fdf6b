from pathlib import Path

import matplotlib
import numpy as np
import pytest

from ppldm.utils.pictures import find_face, with_title

FONTS = Path(matplotlib.get_data_path(), "fonts/ttf")
SANS = [FONTS / f"DejaVuSans{style}.ttf" for style in ("-Bold", "-BoldOblique", "-Oblique", "")]
SERIF = [FONTS / f"DejaVuSerif{style}.ttf" for style in ("-Bold", "")]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    "families, files, expected",
    [
        (("DejaVu Sans",), SANS, "DejaVuSans.ttf"),
        (("DejaVu Serif", "DejaVu Sans"), SANS + SERIF, "DejaVuSerif.ttf"),
        (("Noto Sans CJK", "DejaVu Sans"), SANS + SERIF, "DejaVuSans.ttf"),
        (("DejaVu Sans",), SANS[:1], "DejaVuSans-Bold.ttf"),
        (("Noto Sans CJK",), SANS, None),
        (("DejaVu Sans",), [], None),
    ],
)
def test_the_face_is_of_the_first_family_and_of_ordinary_weight(families, files, expected, order):
    found = find_face(families, [str(path) for path in files[::order]])
    assert (found and Path(found).name) == expected


def test_a_file_that_is_not_a_font_is_passed_over(tmp_path):
    (tmp_path / "a.ttf").write_bytes(b"no font")
    assert find_face(("DejaVu Sans",), [str(tmp_path / "a.ttf"), str(SANS[-1])]) == str(SANS[-1])


@pytest.mark.parametrize("width", [8, 600])
def test_a_title_stands_above_the_picture_and_fits(width):
    picture = np.full((16, width, 3), 7, dtype=np.uint8)
    titled = with_title(picture, "ddim-samples-7.5, step 1,400")
    height = titled.shape[0] - 16
    assert np.array_equal(titled[height:, :width], picture) and titled.shape[1] >= max(width, 100)
    assert (titled[:height] < 128).any() and (titled[:, -3:] == 255).all() == (width == 8)
