"""Environment variables: what the user has set stays."""

import pytest

from ppldm.utils import variables


@pytest.mark.parametrize("value, on", [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)])
def test_switches(monkeypatch, value, on):
    monkeypatch.delenv("PPLDM_X", raising=False)
    if value is not None:
        monkeypatch.setenv("PPLDM_X", value)
    assert variables.is_on("PPLDM_X") is on
    assert variables.read("PPLDM_X", "default") == ("default" if value is None else value)


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("PPLDM_X", "mine")
    monkeypatch.setenv("PPLDM_Y", "")
    monkeypatch.delenv("PPLDM_Y")
    variables.set_for_libraries({"PPLDM_X": "yours", "PPLDM_Y": "new"})
    assert (variables.read("PPLDM_X"), variables.all_variables()["PPLDM_Y"]) == ("mine", "new")
    variables.set_for_libraries({"PPLDM_X": "yours"}, replace=True)
    assert variables.read("PPLDM_X") == "yours"
