from ppldm.utils.errors import PpldmError, RowError


def test_an_error_is_one_line_whatever_it_quotes():
    assert str(PpldmError("a\nb\r\n\x1b[31m c\x00\x85d 图")) == "a b [31m c d 图"
    assert str(RowError("reason", "a\n\nb")) == "a b"
