"""A stop string may lie anywhere in the output, across tokens too (case R7)."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchrun.cli.main import main
from batchrun.engine.detokenize import TextStream
from batchrun.engine.loader import load_tokenizer, resolve_model

PROMPT = "Zanzibar is an island. The café in Paris is famous for its"
pytestmark = pytest.mark.usefixtures("signal_handlers_kept")


def test_output_ends_before_the_stop_string_wherever_it_lies(run_job: Callable[..., Any], embedded_model: Path) -> None:
    _, tokenizer = load_tokenizer(resolve_model(str(embedded_model)))

    def run(stops: list[list[str]], include: list[bool]) -> list[dict[str, Any]]:
        columns = {"prompt": [PROMPT] * len(stops), "stop": pa.array(stops, pa.list_(pa.string())), "include_stop": include}
        return run_job(pa.table(columns), model=embedded_model, max_tokens=24).rows

    (plain,) = run([[]], [False])
    ids, text = plain["output_ids"], plain["output"]
    assert len(ids) == 24
    assert "Zanzibar" in PROMPT
    assert "Zanzibar" not in text
    stream = TextStream(tokenizer)
    pieces = [piece for piece in (stream.push(token) for token in ids) if piece]
    assert "".join(pieces) == text
    assert len(pieces) > 12

    stops = [[left[-1] + right[0]] for left, right in pairwise(pieces)]
    stops += [[pieces[0]], [text[0]]]
    late, early = text[-4:-1], pieces[3] + pieces[4][:1]
    assert text.index(early) < text.index(late)
    # Both of these are complete with one token, and the later-listed one begins before the other.
    both = [[right[2:], left[-1] + right[0]] for left, right in pairwise(pieces) if len(right) > 4]
    both = [stop for stop in both if 0 <= text.index(stop[0]) - text.index(stop[1]) == 3]
    assert both
    stops += [[late, early], *both]
    include = [False] * len(stops)
    stops, include = [*stops, stops[0], [early]], [*include, True, True]
    stops, include = [*stops, ["Zanzibar"]], [*include, False]
    rows = run(stops, include)

    *rows, never = rows
    assert (never["output"], never["finish_reason"], never["output_ids"]) == (text, "length", ids)
    for row, stop, keep in zip(rows, stops, include, strict=False):
        at = min(text.index(string) for string in stop)
        needed = next(k for k in range(1, 25) if any(string in tokenizer.decode(ids[:k]) for string in stop))
        end = at + len(stop[-1]) if keep else at
        assert row["output"] == text[:end], stop
        assert row["finish_reason"] == "stop"
        assert row["error"] is None
        assert row["output_ids"] == ids[:needed], stop
        if keep:
            assert row["output"].count(stop[0]) == 1
    assert [row["output"] for row in rows[len(pieces) - 1 : len(pieces) + 1]] == ["", ""]


def test_an_empty_stop_string_is_refused(
    run_job: Callable[..., Any], embedded_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pa.table({"prompt": ["a", "b"], "stop": pa.array([[""], ["x"]], pa.list_(pa.string()))})
    rows = run_job(table, model=embedded_model, max_tokens=1).rows
    assert rows[0]["finish_reason"] == "error"
    assert "'stop'" in rows[0]["error"]
    assert rows[1]["error"] is None
    assert main(["run", str(tmp_path / "in-0.parquet"), "-o", str(tmp_path / "x.parquet"), "--stop", ""]) == 2
    assert "--stop" in capsys.readouterr().err
    assert not (tmp_path / "x.parquet").exists()
