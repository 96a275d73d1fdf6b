"""Laws: a file that is there is meant before a name; the older path of a packaged config stands for its name."""

import pytest

from ppldm.config.network_files import CONFIG_DIR, find_network_file, list_network_files
from ppldm.utils.errors import ConfigError


@pytest.mark.parametrize("name", list_network_files())
@pytest.mark.parametrize("form", ["{}", "examples/config/{}.json", "/clone/examples/config/{}.json"])
def test_a_packaged_config_is_found_by_its_name_and_its_older_path(tmp_path, monkeypatch, name, form):
    monkeypatch.chdir(tmp_path)
    assert find_network_file(form.format(name)) == CONFIG_DIR / f"{name}.json"


@pytest.mark.parametrize("value", ["unet_tiny", "examples/config/unet_tiny.json"])
def test_a_file_that_is_there_comes_first(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    (tmp_path / value).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / value).write_text("{}")
    assert (tmp_path / find_network_file(value)).samefile(tmp_path / value)


@pytest.mark.parametrize(
    "value, words",
    [
        ("unet_tinny", "--unet_config_file unet_tinny is not there; did you mean unet_tiny?"),
        ("examples/config/unet_13.json", "did you mean unet_12?"),
        ("mine/unet_tiny.json", "is not there; did you mean unet_tiny?"),
        ("mine.json", "is not there; give the path of a JSON file, or one of cascade_b_3b, "),
        (".", "is a folder"),
        ("", "is a folder"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path, monkeypatch, value, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        find_network_file(value, "--unet_config_file")
    assert words in str(caught.value) and "\n" not in str(caught.value)
