"""The whole job on a tiny random model: what is computed, written, counted and resumed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun import hardware, pipeline
from batchrun.engine import loader
from batchrun.engine.sampling_params import SamplingParams
from batchrun.errors import Refused, Stopped
from batchrun.kernels import native
from batchrun.options import PromptOptions, RunOptions
from batchrun.pipeline import RunResult, run
from batchrun.plan_report import plan_job
from batchrun.sources import Source

SUMMARY_KEYS = [
    "rows",
    "ok",
    "failed",
    "samples",
    "prompt_tokens",
    "trie_tokens",
    "computed_prompt_tokens",
    "recomputed_tokens",
    "output_tokens",
    "load_s",
    "plan_s",
    "run_s",
    "rows_per_s",
    "total_tokens_per_s",
    "peak_kv_tokens",
    "preemptions",
    "evictions",
    "steps",
    "decode_steps",
    "model",
    "device",
    "dtype",
    "kv_dtype",
]
TIMING_COLUMNS = {
    "queue_ms", "prefill_ms", "ttft_ms", "tpot_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms", "latency_ms", "started_at",
    "run_id",
}  # fmt: skip


class Job:
    """Runs one input with the tiny model into one folder."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model

    def run(
        self, columns: dict[str, list[Any]], stop: Any = None, sampling: SamplingParams | None = None, **options: Any
    ) -> RunResult:
        source = self.folder / "input.parquet"
        pq.write_table(pa.table(columns), source)
        options = {"dtype": "float32", "threads": 1, "output": self.folder / "out.parquet", "prompt": PromptOptions(), **options}
        made = RunOptions(
            inputs=(str(source),),
            model=str(self.model),
            sampling=sampling or SamplingParams(max_tokens=6, ignore_eos=True),
            **options,
        )
        return run(made, stop=stop)


@pytest.fixture
def job(tmp_path: Path, tiny_model_folder: Path) -> Job:
    return Job(tmp_path, tiny_model_folder)


def rows_of(result: RunResult) -> list[dict[str, Any]]:
    return pq.read_table(result.output).to_pylist()


def untimed(result: RunResult) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in TIMING_COLUMNS} for row in rows_of(result)]


PROMPTS = [f"the cat and the dog {word} in the" for word in ("one", "two", "three", "four", "five", "six", "seven", "eight")]


def test_summary_has_the_contract_keys_and_agrees_with_the_rows(job: Job) -> None:
    result = job.run({"prompt": [*PROMPTS, None, PROMPTS[0]]})
    assert set(SUMMARY_KEYS) <= set(result.summary)
    rows = rows_of(result)
    assert [row["row_index"] for row in rows] == list(range(10))
    assert (result.summary["rows"], result.summary["ok"], result.summary["failed"]) == (10, 9, 1)
    assert result.exit_code == 1
    assert result.summary["output_tokens"] == sum(row["output_tokens"] for row in rows) == 9 * 6
    assert result.summary["prompt_tokens"] == sum(row["prompt_tokens"] for row in rows)
    assert result.summary["computed_prompt_tokens"] == result.summary["trie_tokens"]
    computed = [row["prompt_tokens"] - row["cached_tokens"] for row in rows if row["error"] is None]
    assert sum(computed) == result.summary["trie_tokens"]


def test_duplicate_of_a_greedy_row_is_fanned_out_with_its_times(job: Job) -> None:
    first, second, third = rows_of(job.run({"prompt": [PROMPTS[0], PROMPTS[1], PROMPTS[0]]}))
    assert third["output"] == first["output"]
    assert third["cached_tokens"] == third["prompt_tokens"]
    assert first["cached_tokens"] < first["prompt_tokens"]
    assert [third[name] for name in TIMING_COLUMNS] == [first[name] for name in TIMING_COLUMNS]
    assert second["cached_tokens"] > 0


def test_every_time_is_ordered_and_one_token_has_no_gaps(job: Job) -> None:
    rows = rows_of(job.run({"prompt": PROMPTS, "max_tokens": [1, 2, 3, 4, 5, 6, 7, 8]}, max_running=2))
    for row in rows:
        assert 0 <= row["queue_ms"] <= row["ttft_ms"] <= row["latency_ms"]
        assert row["ttft_ms"] == pytest.approx(row["queue_ms"] + row["prefill_ms"])
    assert rows[0]["tpot_ms"] is None
    assert rows[0]["itl_max_ms"] is None
    assert rows[1]["tpot_ms"] == rows[1]["itl_max_ms"] > 0


def test_greedy_samples_are_computed_once_and_drawn_samples_differ(job: Job) -> None:
    result = job.run({"prompt": PROMPTS[:2], "n": [3, 4], "temperature": [0.0, 1.5]})
    rows = rows_of(result)
    assert [(row["row_index"], row["sample"]) for row in rows] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert len({row["output"] for row in rows[:3]}) == 1
    assert len({row["output"] for row in rows[3:]}) > 1
    assert any("n > 1" in warning for warning in result.warnings)
    assert result.summary["samples"] == 7


@pytest.mark.parametrize("after", [1, 4, 9])
def test_stopped_run_resumes_to_the_rows_of_an_undisturbed_one(job: Job, after: int) -> None:
    columns = {"prompt": [*PROMPTS, None], "n": [1, 2, 1, 3, 1, 1, 1, 1, 1], "temperature": [0.0, 1.0, 0.0, 1.0, 0, 0, 0, 0, 0]}
    whole = untimed(job.run(columns, return_token_ids=True))
    polls = iter([False] * after + [True] * 100)
    options = {"output": job.folder / "cut.parquet", "return_token_ids": True, "max_running": 2}
    with pytest.raises(Stopped, match="left"):
        job.run(columns, stop=lambda: next(polls), **options)
    assert not (job.folder / "cut.parquet").exists()
    resumed = job.run(columns, resume=True, **options)
    rows = untimed(resumed)
    # A row whose prefix was computed by the first process computes it again, so only the counts of shared tokens may differ.
    assert [row | {"cached_tokens": 0} for row in rows] == [row | {"cached_tokens": 0} for row in whole]
    assert resumed.summary["rows"] == 9
    assert resumed.summary["failed"] == 1
    assert not (job.folder / "cut.parquet.batchrun").exists()


def test_resume_with_other_settings_names_the_difference(job: Job) -> None:
    polls = iter([False, False, True])
    with pytest.raises(Stopped):
        job.run({"prompt": PROMPTS}, stop=lambda: next(polls))
    with pytest.raises(Refused, match="max-tokens"):
        job.run({"prompt": PROMPTS}, resume=True, sampling=SamplingParams(max_tokens=7, ignore_eos=True))
    with pytest.raises(Refused, match="input"):
        job.run({"prompt": ["another", *PROMPTS]}, resume=True)
    job.run({"prompt": PROMPTS}, resume=True)
    again = job.run({"prompt": PROMPTS}, resume=True)
    assert "finished already" in again.warnings[0]


def test_refusal_leaves_nothing_behind(job: Job) -> None:
    with pytest.raises(Refused, match="kv-tokens"):
        job.run({"prompt": PROMPTS}, kv_tokens=3)
    assert [path.name for path in job.folder.iterdir()] == ["input.parquet"]


def test_row_that_never_fits_is_an_error_that_names_both_numbers(job: Job) -> None:
    rows = rows_of(job.run({"prompt": [PROMPTS[0], "the " * 200]}, kv_tokens=128))
    assert rows[0]["error"] is None
    assert "128" in rows[1]["error"]
    assert rows[1]["prompt_tokens"] > 200


def test_the_most_frequent_reasons_for_failure_are_told_with_a_row(job: Job) -> None:
    prompts = [None, "", "the cat", "the " * 600, None, "", "the " * 700, None]
    tokens = [6] * 7 + [6.5]
    result = job.run({"prompt": prompts, "max_tokens": tokens})
    assert len(result.failures) == 3
    assert result.failures[0] == "3 failed, such as row 0: column 'prompt' is null: every row needs a prompt"
    assert result.failures[1] == "2 failed, such as row 1: column 'prompt' is empty: every row needs a prompt"
    assert result.failures[2].startswith("2 failed, such as row 3: the prompt has ")
    assert job.run({"prompt": PROMPTS}, output=job.folder / "fine.parquet").failures == []


def test_reasons_of_rows_that_an_earlier_process_finished_are_told_too(job: Job) -> None:
    polls = iter([False] * 4 + [True] * 100)
    with pytest.raises(Stopped):
        job.run({"prompt": [None, *PROMPTS]}, stop=lambda: next(polls))
    resumed = job.run({"prompt": [None, *PROMPTS]}, resume=True)
    assert resumed.failures == ["row 0 failed: column 'prompt' is null: every row needs a prompt"]


def test_more_threads_than_processors_are_not_used(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    load = pipeline.load_model
    monkeypatch.setattr(pipeline, "load_model", lambda *call: seen.append(call[3]) or load(*call[:3], 1))
    monkeypatch.setattr(hardware, "usable_cpus", lambda: 2)
    warnings = [job.run({"prompt": PROMPTS}, threads=threads, overwrite=True).warnings for threads in (4096, 2, 1, None)]
    assert seen == [2, 2, 1, 2]
    assert warnings == [["--threads is 4096 and this process may use 2 processors: 2 are used"], [], [], []]


def test_input_without_rows_gives_an_output_without_rows(job: Job) -> None:
    result = job.run({"prompt": pa.array([], pa.string())})
    assert rows_of(result) == []
    assert result.exit_code == 0
    assert pq.read_schema(result.output).field("error").type == pa.string()


def test_two_runs_write_the_same_rows(job: Job) -> None:
    columns = {"prompt": PROMPTS, "temperature": [0.0, 0.9] * 4}
    assert untimed(job.run(columns)) == untimed(job.run(columns, overwrite=True))


def test_token_that_the_model_has_no_embedding_for_costs_its_row(job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "grown"
    shutil.copytree(job.model, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {"id": 100_000, "content": "<|new|>", "special": True}
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], **added})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    grown = Job(tmp_path, folder)
    rows = rows_of(grown.run({"prompt": ["the cat <|new|>", "the cat"]}, prompt=PromptOptions(raw=True)))
    assert "token" in rows[0]["error"]
    assert rows[1]["error"] is None


def test_fan_out_of_many_copies_stops_when_asked(job: Job) -> None:
    polls = iter([False, False] + [True] * 100)
    with pytest.raises(Stopped):
        job.run({"prompt": PROMPTS[:1], "n": [50_000]}, stop=lambda: next(polls))
    done = job.run({"prompt": PROMPTS[:1], "n": [50_000]}, resume=True)
    assert done.summary["samples"] == 50_000


def test_pool_beyond_the_machine_is_refused(job: Job) -> None:
    with pytest.raises(Refused, match="kv-memory"):
        job.run({"prompt": PROMPTS}, kv_memory=2**60)
    with pytest.raises(Refused, match="kv-tokens"):
        job.run({"prompt": PROMPTS}, kv_tokens=2**31 - 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_memory": 2**60}, "kv-memory"),
        ({"kv_tokens": 2**31 - 1}, "kv-tokens"),
        ({"output": Path("/proc/out.parquet")}, "cannot be written"),
        ({"resume": True, "sampling": SamplingParams(max_tokens=7)}, "max-tokens"),
    ],
)
def test_what_no_row_could_change_is_refused_before_rows_or_model_are_read(
    job: Job, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    job.run({"prompt": PROMPTS})
    monkeypatch.setattr(Source, "batches", None)
    monkeypatch.setattr(Source, "content_hash", None)
    monkeypatch.setattr(pipeline, "content_hash", None)
    with pytest.raises(Refused, match=message):
        job.run({"prompt": PROMPTS}, **{"overwrite": "resume" not in options, **options})
    assert sorted(path.name for path in job.folder.iterdir()) == ["input.parquet", "out.parquet"]


INT8 = {"dtype": "bfloat16", "kv_dtype": "int8"}


@pytest.mark.usefixtures("compiled_kernel")
def test_keys_in_int8_take_about_half_the_memory_and_are_named_in_the_summary(job: Job) -> None:
    plain = job.run({"prompt": PROMPTS}, dtype="bfloat16", kv_memory=1 << 20)
    small = job.run({"prompt": PROMPTS}, kv_memory=1 << 20, output=job.folder / "small.parquet", **INT8)
    assert (plain.summary["dtype"], plain.summary["kv_dtype"]) == ("bfloat16", "bfloat16")
    assert (small.summary["dtype"], small.summary["kv_dtype"]) == ("bfloat16", "int8")
    # Head dim 16: 2 x 16 bytes of bfloat16, or 16 of int8 and a scale of 4.
    assert small.summary["kv_pool_tokens"] / plain.summary["kv_pool_tokens"] == pytest.approx(32 / 20, rel=0.02)
    assert small.summary["failed"] == 0


@pytest.mark.usefixtures("compiled_kernel")
def test_resume_with_keys_in_another_type_is_refused(job: Job) -> None:
    polls = iter([False, False, True])
    with pytest.raises(Stopped):
        job.run({"prompt": PROMPTS}, stop=lambda: next(polls), **INT8)
    with pytest.raises(Refused, match=r"kv-dtype \('int8' -> 'auto'\)"):
        job.run({"prompt": PROMPTS}, resume=True, dtype="bfloat16")
    assert job.run({"prompt": PROMPTS}, resume=True, **INT8).summary["failed"] == 0
    with pytest.raises(Refused, match=r"kv-dtype \('int8' -> 'auto'\)"):
        job.run({"prompt": PROMPTS}, resume=True, dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "float16", "auto"])
def test_keys_in_int8_go_with_bfloat16_only(job: Job, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(loader, "cpu_has_bfloat16", lambda: False)
    computed = "float32" if dtype == "auto" else dtype
    message = f"--kv-dtype is int8, which goes with bfloat16, and the job computes in {computed}: add --dtype bfloat16, or leave"
    with pytest.raises(Refused, match=message):
        job.run({"prompt": PROMPTS}, kv_dtype="int8", dtype=dtype)
    assert [path.name for path in job.folder.iterdir()] == ["input.parquet"]


def test_keys_in_int8_without_the_compiled_kernel_are_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda _: native.NotAvailable("no C compiler found: install gcc or clang"))
    message = r"needs the compiled kernel, and there is none \(no C compiler found: install gcc or clang\): leave --kv-dtype out"
    with pytest.raises(Refused, match=message):
        job.run({"prompt": PROMPTS}, **INT8)
    assert [path.name for path in job.folder.iterdir()] == ["input.parquet"]


def test_a_plan_for_this_machine_refuses_a_pool_beyond_it(job: Job, tmp_path: Path) -> None:
    source = tmp_path / "input.parquet"
    pq.write_table(pa.table({"prompt": PROMPTS}), source)
    for options in ({"kv_memory": 2**60}, {"kv_tokens": 2**31 - 1}):
        made = RunOptions((str(source),), tmp_path / "x.parquet", model=str(job.model), **options)
        with pytest.raises(Refused, match="this machine has"):
            plan_job(made)
        machine = tmp_path / "machine.toml"
        machine.write_text("flop_per_s = 1e12\nbytes_per_s = 1e11\nmemory_bytes = 1000000000000000000000\n")
        assert plan_job(made, str(machine)).rows == len(PROMPTS)


def test_nothing_that_refuses_early_imports_torch() -> None:
    code = "import sys, batchrun.pipeline, batchrun.plan_report, batchrun.opening; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_template_that_breaks_its_own_json_costs_the_row(job: Job) -> None:
    template = '[{"role": "user", "content": "{{ q }}"}]'
    rows = rows_of(job.run({"q": ["hello", 'say "hello"', "[1, 2]"]}, prompt=PromptOptions(template=template)))
    assert [row["error"] is None for row in rows] == [True, False, True]
    assert "tojson" in rows[1]["error"]


def test_profile_counts_every_token_and_names_where_the_time_went(job: Job) -> None:
    profile = job.folder / "steps.parquet"
    summary = job.run({"prompt": ["one two", "one three", "four"]}, profile=profile).summary
    steps = pq.read_table(profile).to_pydict()
    assert steps["step"] == list(range(summary["steps"]))
    assert sum(steps["prompt_tokens"]) == summary["computed_prompt_tokens"]
    assert sum(steps["logit_rows"]) == summary["output_tokens"]
    assert sum(steps["output_tokens"]) == summary["output_tokens"] - 3, "the first token of each row comes from its prompt"
    assert steps["rows"][0] == 3
    assert min(*steps["kv_tokens"], *steps["segments"]) > 0
    for part in ("schedule", "linear", "attention", "elementwise", "rotary", "forward_other", "sample", "collect", "write"):
        assert min(steps[f"{part}_s"]) > 0, f"no seconds in {part}"
    measured = sum(sum(column) for name, column in steps.items() if name.endswith("_s") and name != "started_s")
    assert 0 < measured <= summary["run_s"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("steps.csv", "ends in .parquet"),
        ("missing/steps.parquet", "there is no folder"),
        ("input.parquet", "an input or the output"),
        ("out.parquet", "an input or the output"),
        ("old.parquet", "exists already"),
    ],
)
def test_a_profile_that_cannot_be_written_is_refused_before_anything_is_made(job: Job, name: str, message: str) -> None:
    (job.folder / "old.parquet").write_bytes(b"kept")
    with pytest.raises(Refused, match=message):
        job.run({"prompt": ["one"]}, profile=job.folder / name)
    assert (job.folder / "old.parquet").read_bytes() == b"kept"
    assert sorted(path.name for path in job.folder.iterdir()) == ["input.parquet", "old.parquet"]


def test_one_line_says_when_there_is_no_compiled_kernel(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchrun.pipeline.missing_kernel", lambda dtype: f"torch operations: no compiler for {dtype}")
    (warning,) = job.run({"prompt": ["one"]}).warnings
    assert warning.endswith("without the compiled kernel, several times slower: torch operations: no compiler for float32")
