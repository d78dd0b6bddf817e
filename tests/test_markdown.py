"""Tables in Markdown."""

from flash_lm.report.markdown import pivot


def test_a_pivot_has_holes_where_there_is_no_line():
    lines = [{"f": "x", "n": 512, "v": 1.0}, {"f": "x", "n": 1024, "v": 2.0}, {"f": "y", "n": 1024, "v": 3.0}]
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in pivot(lines, "f", "n", "v", "{:.0f}", 10).split("\n")
    ]
    assert rows[0] == ["f", "512", "1,024"] and rows[2:] == [["x", "10", "20"], ["y", "", "30"]]
