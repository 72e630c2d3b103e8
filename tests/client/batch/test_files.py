"""The batch's files: what they may hold, and what survives an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from client.batch import files
from client.batch.files import BatchFileError, Results, custom_ids, requests_but

KNOWN = {"a": 1, "b": 2, "c": 3}


def result(custom_id: str, error: Any = None) -> dict[str, Any]:
    return {"custom_id": custom_id, "response": {"status_code": 200}, "error": error}


def lines_of(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def test_requests_are_read_in_order(tmp_path: Path) -> None:
    """Empty lines, a byte order mark and Windows line ends are no part of them."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"custom_id": "a"}\r\n\n{"custom_id": "b"}\n{"custom_id": "c"}')
    assert custom_ids(path) == {"a": 1, "b": 3, "c": 4}
    assert [line["custom_id"] for line in requests_but(path, {"b"})] == ["a", "c"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            b'{"custom_id": "a"}\n{"custom_id": "b"}\n{"custom_id": "a"}\n',
            "line 3: .*that of line 1",
        ),
        (b'{"custom_id": "a"}\n{"custom_id":\n', "line 2 is no JSON object"),
        (b'["a"]\n', "line 1 is no JSON object"),
        (b"\xff\xfe\n", "line 1 is no JSON object"),
        (b"{}\n", "line 1: custom_id is None; allowed: a text of its own"),
        (b'{"custom_id": ""}\n', "line 1: custom_id is ''; allowed"),
    ],
)
def test_a_file_that_is_no_batch(tmp_path: Path, content: bytes, sentence: str) -> None:
    """Said with the line, before anything is sent."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    with pytest.raises(BatchFileError, match=sentence):
        custom_ids(path)


def test_results_are_whole_at_once(tmp_path: Path) -> None:
    """A process that is killed between two results has both on disk or one."""
    path = tmp_path / "out.jsonl"
    with Results(path, KNOWN, drops_failed=False) as results:
        assert results.finished == set()
        results.append(result("a"))
        assert lines_of(path) == ["a"]
        results.append(result("b", "e"))
        assert lines_of(path) == ["a", "b"]
    with Results(path, KNOWN, drops_failed=False) as results:
        assert (results.finished, results.num_failed) == ({"a", "b"}, 1)
        results.append(result("c"))
    assert lines_of(path) == ["a", "b", "c"]


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_last_line_that_was_cut_off(tmp_path: Path, cut: int) -> None:
    """Wherever the disk was full or the power went: the line is dropped, or completed."""
    path = tmp_path / "out.jsonl"
    whole = (json.dumps(result("a")) + "\n").encode()
    last = (json.dumps(result("b")) + "\n").encode()
    path.write_bytes(whole + last[:-cut])
    with Results(path, KNOWN, drops_failed=False) as results:
        assert results.finished == ({"a", "b"} if cut == 1 else {"a"})
        results.append(result("c"))
    assert lines_of(path) == (["a", "b", "c"] if cut == 1 else ["a", "c"])


@pytest.mark.parametrize(
    "content",
    [b"notes of mine\n", b'{"custom_id": "z", "response": {}}\n', b'{"custom_id": "a"}\n'],
)
def test_another_file_is_not_touched(tmp_path: Path, content: bytes) -> None:
    """IN and OUT in the wrong order, or the results of another batch."""
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(BatchFileError, match=r"line 1 is no result of this input; name another"):
        Results(path, KNOWN, drops_failed=False)
    assert path.read_bytes() == content


def test_failed_results_can_be_dropped(tmp_path: Path) -> None:
    """To ask again after what was wrong has been put right."""
    path = tmp_path / "out.jsonl"
    with Results(path, KNOWN, drops_failed=False) as results:
        for custom_id, error in (("a", None), ("b", "e"), ("c", None)):
            results.append(result(custom_id, error))
    with Results(path, KNOWN, drops_failed=True) as results:
        assert (results.finished, results.num_failed) == ({"a", "c"}, 0)
        results.append(result("b"))
    assert lines_of(path) == ["a", "c", "b"]
    assert list(tmp_path.iterdir()) == [path]


def test_two_runs_at_once(tmp_path: Path) -> None:
    """They would answer everything twice into one file."""
    path = tmp_path / "out.jsonl"
    with (
        Results(path, KNOWN, drops_failed=False),
        pytest.raises(BatchFileError, match="another batch is writing it"),
    ):
        Results(path, KNOWN, drops_failed=False)
    Results(path, KNOWN, drops_failed=False).__exit__()


def test_results_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then and at the end; after each, a fast batch would wait for the disk only."""
    synced: list[int] = []
    monkeypatch.setattr(files.os, "fsync", synced.append)
    with Results(tmp_path / "out.jsonl", KNOWN, drops_failed=False) as results:
        results.append(result("a"))
        assert synced == []
        monkeypatch.setattr(files, "SYNC_SECONDS", 0.0)
        results.append(result("b"))
        assert len(synced) == 1
    assert len(synced) == 2
