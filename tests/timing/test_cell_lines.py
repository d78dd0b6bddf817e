"""The file of a benchmark's lines while it is written."""

from flash_lm.runs.jsonl import read_jsonl, write_jsonl
from flash_lm.timing.cell_lines import CellLines


def test_a_cell_has_one_line_and_the_file_has_all_cells_at_any_time(tmp_path):
    file = tmp_path / "out" / "x.jsonl"
    file.parent.mkdir()
    write_jsonl(file, [{"family": "of an older run", "length": 1}])
    lines = CellLines(file, "family", "length")
    assert not file.exists()
    lines.put({"family": "a", "length": 1, "compile_s": 2})
    lines.put({"family": "b", "length": 1, "failed": "x"}, {"family": "a", "length": 2})
    assert [line["family"] for line in read_jsonl(file)] == ["a", "b", "a"]
    lines.put({"family": "a", "length": 1, "compile_s": 2, "median_ms": 3})
    assert read_jsonl(file) == lines.lines
    assert [line.get("median_ms") for line in lines.lines] == [3, None, None]
    assert [path.name for path in file.parent.iterdir()] == ["x.jsonl"]
