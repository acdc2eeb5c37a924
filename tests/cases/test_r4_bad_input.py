"""Ten rows of which half are bad: each costs itself alone (case R4).

With the embedded model the long rows take most of a minute in float32, so by default they run on a tiny random model whose
context is the same; the whole case on the embedded model is marked `slow`, but for the small pool, into which they do not fit.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.cli.main import main
from batchrun.engine.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("signal_handlers_kept", "cached_models")
CONTEXT = 8192
ERRORS = {1, 2, 3, 4, 6}


def repeated(n: int) -> str:
    """n tokens for the embedded and for the tiny model, whose BPE both know " the" (the tiny one has no "the")."""
    return " the" * n


def string_array(cells: list[bytes | None]) -> pa.Array:
    """A string column of any bytes, UTF-8 or not."""
    lengths = [len(cell or b"") for cell in cells]
    valid = np.packbits([cell is not None for cell in cells], bitorder="little").tobytes()
    offsets = np.cumsum([0, *lengths]).astype(np.int32).tobytes()
    buffers = [pa.py_buffer(valid), pa.py_buffer(offsets), pa.py_buffer(b"".join(cell or b"" for cell in cells))]
    return pa.Array.from_buffers(pa.string(), len(cells), buffers)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    texts = ["hello", None, "", repeated(8193), repeated(8192), repeated(8190), None, "a\0b", repeated(5000), "bye"]
    cells = [None if text is None else text.encode() for text in texts]
    cells[6] = b"\x61\xff\x62"
    table = pa.table({"prompt": string_array(cells), "max_tokens": [None] * 5 + [100] + [None] * 4})
    pq.write_table(table, tmp_path / "ten.parquet")
    return tmp_path / "ten.parquet"


@pytest.fixture(scope="module")
def long_tiny_model(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a context of 8,192 tokens."""
    folder = tmp_path_factory.mktemp("long") / "tiny-llama"
    shutil.copytree(tiny_model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT}))
    return folder


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the command line; gives exit code, output rows by row_index and the texts that reached the tokenizer."""
    texts: list[str] = []
    encode_raw = Tokenizer.encode_raw
    monkeypatch.setattr(Tokenizer, "encode_raw", lambda self, batch: texts.extend(batch) or encode_raw(self, batch))

    def run(source: Path, model: Path, *options: str) -> tuple[int, pa.Table, list[str]]:
        texts.clear()
        output = tmp_path / f"out-{len(list(tmp_path.iterdir()))}.parquet"
        command = ["run", str(source), "-o", str(output), "--model", str(model), "--raw", "--dtype", "float32", "--threads", "1"]
        code = main([*command, "--max-tokens", "8", "--return-token-ids", "--quiet", *options])
        return code, pq.read_table(output), list(texts)

    return run


def check_run(answer: Callable[..., Any], source: Path, model: Path, kv_tokens: int, never_fits: set[int]) -> pa.Table:
    """Runs the ten rows and checks all that holds for any pool; returns the output."""
    code, table, texts = answer(source, model, "--kv-tokens", str(kv_tokens))
    assert code == 1
    rows = table.to_pylist()
    assert [row["row_index"] for row in rows] == list(range(10))
    failed = {row["row_index"] for row in rows if row["error"] is not None}
    assert failed == ERRORS | never_fits
    for row in rows:
        assert (row["finish_reason"] == "error") == (row["row_index"] in failed)
        assert (row["output"] is None) == (row["row_index"] in failed)
    errors = {row["row_index"]: row["error"] for row in rows if row["error"]}
    assert len(set(errors.values())) == len(errors)
    assert "null" in errors[1]
    assert "empty" in errors[2]
    for row, length in ((3, 8193), (4, 8192)):
        assert str(length) in errors[row]
        assert str(CONTEXT) in errors[row]
    assert "UTF-8" in errors[6]
    assert not {"nan", "NaN", "None", "null", ""} & set(texts)
    assert len(texts) == 7
    return table


def check_as_alone(answer: Callable[..., Any], source: Path, model: Path, table: pa.Table, tmp_path: Path) -> None:
    """Rows 0 and 9 equal a run of just those two."""
    pq.write_table(pa.table({"prompt": ["hello", "bye"]}), tmp_path / "two.parquet")
    code, two, _ = answer(tmp_path / "two.parquet", model)
    assert code == 0
    assert [table["output_ids"].to_pylist()[i] for i in (0, 9)] == two["output_ids"].to_pylist()


def check_large_pool(answer: Callable[..., Any], source: Path, model: Path, tmp_path: Path) -> None:
    table = check_run(answer, source, model, 16_384, never_fits=set())
    row = table.to_pylist()[5]
    assert (row["prompt_tokens"], row["output_tokens"], row["finish_reason"]) == (8190, 2, "length")
    check_as_alone(answer, source, model, table, tmp_path)


def check_small_pool(answer: Callable[..., Any], source: Path, model: Path, tmp_path: Path) -> None:
    table = check_run(answer, source, model, 4096, never_fits={5, 8})
    errors = table["error"].to_pylist()
    # Needed, in whole pages, and available.
    for row, least in ((5, 8191), (8, 5007)):
        numbers = [int(word) for word in errors[row].replace("(", " ").split() if word.isdigit()]
        assert least <= numbers[0] < least + 64, errors[row]
        assert "4096" in errors[row]
    check_as_alone(answer, source, model, table, tmp_path)


def test_large_pool(answer: Callable[..., Any], source: Path, long_tiny_model: Path, tmp_path: Path) -> None:
    check_large_pool(answer, source, long_tiny_model, tmp_path)


@pytest.mark.slow
def test_large_pool_with_the_embedded_model(
    answer: Callable[..., Any], source: Path, embedded_model: Path, tmp_path: Path
) -> None:
    check_large_pool(answer, source, embedded_model, tmp_path)


def test_small_pool(answer: Callable[..., Any], source: Path, long_tiny_model: Path, tmp_path: Path) -> None:
    check_small_pool(answer, source, long_tiny_model, tmp_path)


def test_small_pool_with_the_embedded_model(
    answer: Callable[..., Any], source: Path, embedded_model: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    check_small_pool(answer, source, embedded_model, tmp_path)
    (output,) = (path for path in tmp_path.glob("out-*.parquet") if pq.read_metadata(path).num_rows == 10)
    capsysbinary.readouterr()
    question = "select prompt from rows where row_index in (6, 9) order by row_index"
    assert main(["sql", str(output), question, "--format", "csv"]) == 0
    assert capsysbinary.readouterr().out.decode().split() == ["prompt", "a\ufffdb", "bye"]
