"""`batchrun.run` and `batchrun.plan`: inputs of every kind, options by name, what comes back. The pipeline is played here."""

import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchrun
from batchrun import api
from batchrun.engine.sampling_params import SamplingParams
from batchrun.errors import Refused
from batchrun.options import RunOptions


class Pipeline:
    """Answers every row with its prompt in capitals and keeps the options that it got."""

    def __init__(self) -> None:
        self.options: RunOptions | None = None
        self.progress: Any = None

    def run(self, options: RunOptions, progress: Any = None, stop: Callable[[], bool] | None = None) -> Any:
        self.options, self.progress = options, progress
        table = pa.concat_tables([pq.read_table(path) for path in options.inputs])
        table = table.append_column("output", [[text.upper() for text in table["prompt"].to_pylist()]])
        if options.output.suffix == ".parquet":
            pq.write_table(table, options.output)
        else:
            options.output.mkdir()
            for i in range(table.num_rows):
                pq.write_table(table.slice(i, 1), options.output / f"part-{i:05d}.parquet")
        return types.SimpleNamespace(
            summary={"rows": table.num_rows}, exit_code=0, output=options.output, warnings=["w"], failures=["f"]
        )


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    played = Pipeline()
    module = types.ModuleType("batchrun.pipeline")
    module.run = played.run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "batchrun.pipeline", module)
    monkeypatch.setattr(batchrun, "pipeline", module, raising=False)
    return played


@pytest.fixture
def table() -> pa.Table:
    return pa.table({"id": [1, 2, 3], "prompt": ["a", "b", "c"]})


def test_a_table_in_memory_comes_back_with_answers_and_leaves_no_file(
    pipeline: Pipeline, table: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = batchrun.run(table)
    assert result.table.to_pydict() == {"id": [1, 2, 3], "prompt": ["a", "b", "c"], "output": ["A", "B", "C"]}
    assert (result.summary, result.warnings, result.failures, result.output) == ({"rows": 3}, ("w",), ("f",), None)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_printed_unless_asked_for(pipeline: Pipeline, table: pa.Table, capsys: pytest.CaptureFixture[str]) -> None:
    batchrun.run(table)
    pipeline.progress.phase("running")
    assert capsys.readouterr() == ("", "")
    batchrun.run(table, quiet=False)
    pipeline.progress.phase("running")
    assert "running" in capsys.readouterr().err


def test_anything_that_exports_arrow_streams_is_a_table(pipeline: Pipeline, table: pa.Table) -> None:
    class Frame:
        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            return table.__arrow_c_stream__(requested_schema)

    assert batchrun.run(Frame()).table["output"].to_pylist() == ["A", "B", "C"]


def test_paths_go_through_as_they_are(pipeline: Pipeline, table: pa.Table, tmp_path: Path) -> None:
    one, two = tmp_path / "1.parquet", tmp_path / "2.parquet"
    for path in (one, two):
        pq.write_table(table, path)
    result = batchrun.run([one, str(two)], tmp_path / "out.parquet")
    assert pipeline.options is not None
    assert pipeline.options.inputs == (str(one), str(two))
    assert result.output == tmp_path / "out.parquet"
    assert result.table.num_rows == 6
    assert batchrun.run(str(one)).table.num_rows == 3


def test_a_folder_output_is_read_in_order(pipeline: Pipeline, table: pa.Table, tmp_path: Path) -> None:
    result = batchrun.run(table, tmp_path / "run [v=2]")
    assert result.table["output"].to_pylist() == ["A", "B", "C"]
    assert result.table.column_names == ["id", "prompt", "output"]


def test_options_have_the_command_lines_names(pipeline: Pipeline, table: pa.Table, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ prompt }}!")
    batchrun.run(
        table,
        model=Path("m"),
        max_tokens=5,
        stop="x",
        seed=3,
        kv_memory="2KiB",
        kv_dtype="int8",
        no_dedupe=True,
        template=template,
        keep_columns=["id"],
        quiet=True,
    )
    options = pipeline.options
    assert options is not None
    assert (options.model, options.seed, options.kv_memory, options.dedupe, options.prefix_cache) == ("m", 3, 2048, False, True)
    assert (options.sampling.max_tokens, options.sampling.stop, options.kv_dtype) == (5, ("x",), "int8")
    assert (options.prompt.template, options.keep_columns) == ("{{ prompt }}!", ("id",))


def test_every_option_of_the_command_line_is_known_here() -> None:
    from batchrun.cli.run import run_command

    elsewhere = {"inputs", "output", "model", "summary_json"}
    assert {parameter.name for parameter in run_command.params} - elsewhere == set(api.option_names())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_token": 3}, "unknown option 'max_token': did you mean 'max_tokens'?"),
        ({"xyzzy": 3}, "unknown option 'xyzzy': there are chunk_tokens, "),
        ({"max_tokens": 0}, "--max-tokens is 0: it must be between 1 and"),
        ({"kv_memory": "lots"}, "'lots' is no amount of memory"),
        ({"template": "no.jinja"}, "--template is 'no.jinja', which cannot be read"),
        ({"overwrite": True}, "give output="),
        ({"seed": 1.5}, "--seed is 1.5: it must be a whole number"),
        ({"temperature": "hot"}, "--temperature is 'hot': it must be a number"),
        ({"temperature": True}, "--temperature is True: it must be a number"),
        ({"max_tokens": "8"}, "--max-tokens is '8': it must be a whole number"),
        ({"max_tokens": None}, "--max-tokens is None: it must be a whole number"),
        ({"n": True}, "--n is True: it must be a whole number"),
        ({"ignore_eos": 1}, "--ignore-eos is 1: it must be True or False"),
        ({"no_dedupe": "no"}, "--no-dedupe is 'no': it must be True or False"),
        ({"stop": 5}, "--stop holds 5: it must be a string or a list of strings"),
        ({"stop": ["a", 5]}, "--stop holds 5: it must be a string or a list of strings"),
        ({"system": 5}, "--system is 5: it must be a string"),
        ({"kv_memory": 1.5}, "--kv-memory is 1.5: it must be a whole number or a string"),
        ({"kv_dtype": "int4"}, "--kv-dtype is 'int4': it must be one of auto, int8"),
        ({"template": 5}, "--template is 5: it must be a string or a path"),
        ({"threads": "2"}, "--threads is '2': it must be a whole number"),
        ({"quiet": "yes"}, "--quiet is 'yes': it must be True or False"),
        ({"output": 5}, "--output is 5: it must be a path"),
        ({"model": 5}, "--model is 5: it must be a path"),
    ],
)
def test_wrong_options_are_value_errors(pipeline: Pipeline, table: pa.Table, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        batchrun.run(table, **options)
    assert pipeline.options is None


def test_every_option_has_a_type_and_numbers_of_numpy_become_plain() -> None:
    for name in api.option_names():
        if name != "quiet":
            with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} (is|holds) "):
                api._run_options(("in.parquet",), Path("out.parquet"), None, {name: object()})
    given = {"max_tokens": np.int64(3), "temperature": np.float32(0.5), "top_p": 1, "ignore_eos": np.bool_(True), "stop": None}
    made = api._run_options(("in.parquet",), Path("out.parquet"), None, given).sampling
    assert made == SamplingParams(max_tokens=3, temperature=0.5, ignore_eos=True)
    assert [type(value) for value in (made.max_tokens, made.temperature, made.top_p, made.ignore_eos)] == [
        int,
        float,
        float,
        bool,
    ]


def test_a_template_with_a_mistake_is_refused_with_its_file_and_line(table: pa.Table, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    for source in ("one\n{% if %}", "one\n{{ prompt | nofilter }}"):
        template.write_text(source)
        with pytest.raises(Refused, match=re.escape(f"--template {template}, line 2: ")):
            batchrun.run(table, template=template)


def test_other_inputs_are_refused_by_type(pipeline: Pipeline) -> None:
    with pytest.raises(ValueError, match="the input is a int: give paths"):
        batchrun.run(3)
    with pytest.raises(ValueError, match="the input is a dict: give paths"):
        batchrun.run({"prompt": ["a"]})


def test_one_name_of_a_kept_column_is_not_taken_for_a_list_of_letters() -> None:
    made = api._run_options(("in.parquet",), Path("out.parquet"), None, {"keep_columns": "prompt"})
    assert made.keep_columns == ("prompt",)
