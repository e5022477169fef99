from pathlib import Path

from rlcanary.bisect.runs.outputs import COMPRESSED_FROM, compress_large, delete_outputs
from rlcanary.system.files import read_end


def test_large_output_is_compressed_and_its_end_can_be_read(tmp_path: Path) -> None:
    small, large = tmp_path / "1.log", tmp_path / "2.log"
    small.write_text("small\n")
    large.write_text("".join(f"line {number}\n" for number in range(200_000)))
    assert large.stat().st_size > COMPRESSED_FROM
    assert compress_large(small) == small
    compressed = compress_large(large)
    assert compressed == tmp_path / "2.log.gz"
    assert not large.exists()
    assert compressed.stat().st_size < COMPRESSED_FROM
    assert read_end(compressed, 24) == "line 199998\nline 199999\n"
    assert read_end(small, 3) == "ll\n"
    assert read_end(tmp_path / "3.log", 3) == ""


def test_outputs_of_a_search_are_deleted_without_its_journal(tmp_path: Path) -> None:
    for name in ("journal.jsonl", "1.log", "1.environment.log", "2.log.gz"):
        (tmp_path / name).touch()
    delete_outputs(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]
