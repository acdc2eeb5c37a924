"""`batchrun plan` on small files, with the config and tokenizer of a tiny model alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchrun.cli.main import main
from batchrun.engine.sampling_params import SamplingParams
from batchrun.errors import Refused
from batchrun.options import PromptOptions, RunOptions
from batchrun.plan_report import PlanReport, plan_job

TARGET = "flop_per_s = 1e12\nbytes_per_s = 1e11\nmemory_bytes = 17179869184\n"


@pytest.fixture
def bare_model(tiny_model_folder: Path, tmp_path: Path) -> str:
    """The model's folder without its weights."""
    folder = tmp_path / "bare"
    shutil.copytree(tiny_model_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return str(folder)


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / "machine.toml"
    path.write_text(TARGET)
    return str(path)


def parquet(tmp_path: Path, **columns: list[Any]) -> str:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table(columns), path)
    return str(path)


def planned(path: str, model: str, target: str, sampling: SamplingParams | None = None, **prompt: Any) -> PlanReport:
    options = RunOptions(
        (path,), Path("unused.parquet"), model=model, prompt=PromptOptions(**prompt), sampling=sampling or SamplingParams()
    )
    return plan_job(options, target)


def test_counts_rows_tokens_and_what_is_shared(tmp_path: Path, bare_model: str, target: str) -> None:
    prompts = ["the cat and the dog", "the cat and the dog", "the cat in", "zzz", None, ""]
    report = planned(parquet(tmp_path, prompt=prompts), bare_model, target, raw=True)
    from batchrun.engine.tokenizer import Tokenizer

    ids = [tuple(row) for row in Tokenizer.from_folder(Path(bare_model)).encode_raw([text for text in prompts if text])]
    prefixes = {row[:end] for row in ids for end in range(1, len(row) + 1)}
    assert (report.rows, report.failed_rows, report.computed_rows) == (6, 2, 3)
    assert report.prompt_tokens == sum(map(len, ids))
    assert report.distinct_tokens == len(prefixes)
    assert report.saved_share == 1 - len(prefixes) / sum(map(len, ids))
    assert report.errors == {
        "column 'prompt' is null: every row needs a prompt": 1,
        "column 'prompt' is empty: every row needs a prompt": 1,
    }
    (prefix,) = report.biggest
    assert (prefix.rows, prefix.text) == (2, "the cat")
    assert not report.chat_template


def test_kv_bytes_per_token_count_kv_heads_not_query_heads(tmp_path: Path, bare_model: str, target: str) -> None:
    path = parquet(tmp_path, prompt=["the cat"])
    config = Path(bare_model) / "config.json"
    values = json.loads(config.read_text())
    for kv_heads in (4, 2, 1):
        config.write_text(json.dumps({**values, "num_key_value_heads": kv_heads}))
        report = planned(path, bare_model, target)
        assert report.kv_bytes_per_token == 2 * 2 * kv_heads * 16 * 2, "keys and values, 2 layers, head dim 16, bfloat16"
        assert (report.num_heads, report.num_kv_heads) == (4, kv_heads)


def test_keys_in_int8_halve_the_pool_and_want_bfloat16(tmp_path: Path, bare_model: str, target: str) -> None:
    config = Path(bare_model) / "config.json"
    values = json.loads(config.read_text())
    path = parquet(tmp_path, prompt=["the cat"])

    def plan(head_dim: int, **options: Any) -> PlanReport:
        config.write_text(json.dumps({**values, "head_dim": head_dim}))
        return plan_job(RunOptions((path,), Path("unused.parquet"), model=bare_model, **options), target)

    plain, small = plan(128), plan(128, kv_dtype="int8")
    assert (plain.kv_dtype, small.kv_dtype) == ("bfloat16", "int8")
    assert small.kv_bytes_per_token == 2 * 2 * 2 * (128 + 4), "keys and values, 2 layers, 2 heads, numbers and a scale"
    assert small.kv_bytes_per_token / plain.kv_bytes_per_token == pytest.approx(0.5, abs=0.02)
    assert small.kv_pool_tokens == plain.kv_pool_tokens
    assert small.kv_pool_bytes == small.kv_pool_tokens * small.kv_bytes_per_token
    assert f"{small.kv_bytes_per_token} bytes in int8 (4 query heads, 2 KV heads)" in str(small)
    with pytest.raises(Refused, match="--kv-dtype is int8, which goes with bfloat16, and the job computes in float32"):
        plan(128, kv_dtype="int8", dtype="float32")
    with pytest.raises(Refused, match="needs heads of a multiple of 16 dimensions up to 256, and this model's have 72"):
        plan(72, kv_dtype="int8")


def test_a_faster_target_is_predicted_to_be_faster(tmp_path: Path, bare_model: str, target: str) -> None:
    path = parquet(tmp_path, prompt=[f"the cat {number}" for number in range(50)])
    slow, fast = planned(path, bare_model, target), planned(path, bare_model, "h200")
    assert slow.prefill_s / fast.prefill_s == pytest.approx(780)
    assert 0 < fast.tpot_s < slow.tpot_s
    assert 0 < fast.ttft_s < slow.ttft_s
    assert slow.total_s >= slow.decode_s + slow.prefill_s
    assert fast.rows_that_fit == 50


def test_rows_that_fit_follow_the_pool_asked_for(tmp_path: Path, bare_model: str, target: str) -> None:
    path = parquet(tmp_path, prompt=["the cat" * 20 + f" {number}" for number in range(50)])
    fits = []
    for kv_tokens in (400, 1000, 100_000):
        options = RunOptions(
            (path,), Path("x.parquet"), model=bare_model, kv_tokens=kv_tokens, sampling=SamplingParams(max_tokens=33)
        )
        fits.append(plan_job(options, target).rows_that_fit)
    assert 0 < fits[0] < fits[1] < fits[2] == 50


@pytest.mark.usefixtures("signal_handlers_kept")
def test_the_command_prints_text_or_json_and_writes_nothing(
    tmp_path: Path, bare_model: str, target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    messages = [[{"role": "user", "content": f"hello {number}"}] for number in range(3)]
    path = parquet(tmp_path, messages=messages, tools=[[{"name": "f"}]] * 3, n=[2] * 3)
    call = ["plan", path, "--model", bare_model, "--target", target]
    assert main(call) == 0
    shown = capsys.readouterr().out
    for wanted in ("distinct tokens", "biggest shared prefixes", '"<|im_start|>user\\nhello', "rows that fit", "TPOT"):
        assert wanted in shown
    assert "warning: 3 rows have tools, which the model's chat template ignores" in shown
    assert "warning: 3 rows are greedy with n > 1" in shown
    assert main([*call, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["rows"], report["target"], report["chat_template"]) == (3, "machine", True)
    assert list(work.iterdir()) == []


def test_refusals_come_before_rows_are_read(tmp_path: Path, bare_model: str, target: str) -> None:
    path = parquet(tmp_path, prompt=["x"])
    for prompt, message in (({"template": "{{ body }}"}, "--template uses 'body'"), ({"prompt_column": "promt"}, "prompt")):
        with pytest.raises(Refused, match=message):
            planned(path, bare_model, target, **prompt)
    with pytest.raises(Refused, match="--template uses 'body'"):
        planned(path, "./nowhere", target, template="{{ body }}")
    with pytest.raises(Refused, match=r"no model at \./nowhere"):
        planned(path, "./nowhere", target)
    with pytest.raises(Refused, match="--target is 'abacus'"):
        planned(path, bare_model, "abacus")


def test_this_machine_is_measured_when_no_target_is_named(
    tmp_path: Path, bare_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchrun import hardware

    monkeypatch.setattr(hardware, "MEASURE_SECONDS", 0.02)
    report = planned(parquet(tmp_path, prompt=["the cat", "the dog"]), bare_model, "this")
    assert report.target == "this machine"
    assert report.memory_bytes == hardware.total_memory()
    assert report.total_s > 0


def test_an_empty_file_has_a_report(tmp_path: Path, bare_model: str, target: str) -> None:
    path = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    report = planned(str(path), bare_model, target)
    assert (report.rows, report.prompt_tokens, report.total_s) == (0, 0, 0.0)
    assert "0, 0 in error" in str(report)
