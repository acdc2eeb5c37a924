"""Peers in processes of their own: what is said to them, what happens when they are missing or end, how memory is counted."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compare
import engines
import processes
import pytest
from engines import EngineMissing, Peer, Settings
from results import RunFailed
from roofline import Rates

# Answers as a worker does; dies when the file is called "die". It takes 48 MiB for one called "large" and gives them back.
WORKER = """
import json, os, sys
print("noise of the engine")
print("READY", json.dumps({"load_s": 0.5, "version": "1"}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    if job["requests"].endswith("die"):
        sys.exit(3)
    taken = bytearray(48 << 20 if job["requests"].endswith("large") else 1 << 20)
    taken[::4096] = b"x" * len(taken[::4096])
    del taken
    print("RESULT", json.dumps({"wall_s": 2.0, "prompt_tokens": 7, "output_tokens": 3, "cached_tokens": 0, "pid": os.getpid(),
                                "job": job, "tuned": os.environ.get("TUNED")}), flush=True)
"""


def workload(name: str = "requests") -> Any:
    return SimpleNamespace(name="tiny", requests=Path(name), temperature=0.8, num_rows=4, prompt_tokens=7, output_tokens=3)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    (tmp_path / "fake.py").write_text(WORKER)
    monkeypatch.setattr(engines, "PEERS", tmp_path)
    return Settings(model="MODEL", threads=1, pythons={"vllm": Path(sys.executable)}, logs=tmp_path / "new" / "logs")


def peer(settings: Settings, resident: bool, module: str = "json") -> Peer:
    return Peer("vllm", module, "fake.py", ("given", "sorted"), settings, resident)


@pytest.mark.parametrize(("resident", "processes"), [(True, 1), (False, 2)])
def test_a_resident_worker_stays_and_another_is_new_for_every_run(settings: Settings, resident: bool, processes: int) -> None:
    engine = peer(settings, resident)
    try:
        runs = [engine.run(workload(), order) for order in engine.orders]
    finally:
        engine.close()
    assert [run["job"] for run in runs] == [
        {"requests": "requests", "order": order, "temperature": 0.8} for order in ("given", "sorted")
    ]
    assert len({run["pid"] for run in runs}) == processes
    assert {(run["engine"], run["order"], run["load_s"], run["version"]) for run in runs} == {
        ("vllm", "given", 0.5, "1"),
        ("vllm", "sorted", 0.5, "1"),
    }


def test_a_peer_gets_its_environment_and_the_result_records_it(settings: Settings) -> None:
    engine = peer(settings, resident=False).with_environment(TUNED="yes")
    run = engine.run(workload(), "given")
    assert run["tuned"] == "yes"
    assert json.loads(run["environment"]) == {"TUNED": "yes"}


def test_a_worker_that_ends_is_a_failure_that_names_its_log(settings: Settings) -> None:
    engine = peer(settings, resident=True)
    with pytest.raises(RunFailed, match=r"vllm ended with exit code 3: see .*vllm\.log"):
        engine.run(workload("die"), "given")
    engine.close()


def test_the_peak_is_that_of_the_run_and_not_of_what_came_before(settings: Settings) -> None:
    engine = peer(settings, resident=True)
    try:
        peaks = [engine.run(workload(name), "given")["peak_rss_bytes"] for name in ("small", "large", "small")]
    finally:
        engine.close()
    assert peaks[1] - peaks[0] > 40 << 20
    assert peaks[1] - peaks[2] > 40 << 20


def test_processor_time_is_that_of_the_tree() -> None:
    script = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    command = ["sh", "-c", f'"{sys.executable}" -c "$0"; true', script]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        assert 0.2 < processes.cpu_s(process.pid) < 3
        process.stdin.write("\n")


def test_a_share_counts_what_others_computed_and_not_oneself(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, clock = iter([100.0, 112.0, 112.0]), iter([50.0, 60.0, 60.0])
    monkeypatch.setattr(processes, "_busy_s", lambda: next(busy))
    monkeypatch.setattr(processes.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(processes.os, "cpu_count", lambda: 2)
    others = processes.Disturbance(own_cpu_s=3.0)
    assert others.share(own_cpu_s=11.0) == pytest.approx((12 - 8) / (2 * 10))
    assert others.share(own_cpu_s=15.5) == 0.0


def test_a_process_tree_holds_children_of_children() -> None:
    script = "import subprocess; subprocess.run(['sh', '-c', 'sh -c \"echo up; read line; true\"; true'])"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        tree = list(processes.process_tree(process.pid))
        process.stdin.write("\n")
    assert tree[0] == process.pid
    assert len(tree) == 3


@pytest.mark.parametrize(
    ("pythons", "module", "message"),
    [
        ({}, "json", "no environment is named: give --python vllm=VENV/bin/python"),
        ({"vllm": Path("/nowhere/python")}, "json", "there is no Python at /nowhere/python"),
        ({"vllm": Path(sys.executable)}, "no_such_engine", "has no module no_such_engine"),
    ],
)
def test_a_missing_peer_says_why(pythons: dict[str, Path], module: str, message: str) -> None:
    with pytest.raises(EngineMissing, match=message):
        peer(Settings(model="MODEL", threads=1, pythons=pythons), resident=False, module=module)


def test_a_missing_peer_is_named_in_one_line_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    opened = engines.open_engines(["batchrun", "vllm", "batchrun-unshared", "batchrun"], Settings(model="MODEL", threads=1))
    assert [engine.name for engine in opened] == ["batchrun", "batchrun-unshared"]
    assert capsys.readouterr().out == "skipped vllm: no environment is named: give --python vllm=VENV/bin/python\n"


@pytest.mark.parametrize("orders", [("given", "sorted"), ("sorted",)])
def test_vllm_tries_the_orders_that_are_asked_for(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orders: tuple[str, ...]
) -> None:
    (tmp_path / "vllm.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert engines.vllm(replace(settings, peer_orders=orders)).orders == orders


def test_openvino_wants_the_model_in_its_own_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "Peer", lambda *_args, **_named: None)
    with pytest.raises(EngineMissing, match="give --openvino-model FOLDER"):
        engines.openvino(Settings(model="MODEL", threads=1))


class FakeEngine:
    """Says what it is told to say."""

    def __init__(self, name: str, *answers: Any) -> None:
        self.name, self.orders, self.answers, self.closed = name, ("given",), list(answers), False

    def run(self, _workload: Any, order: str) -> dict[str, Any]:
        answer = self.answers.pop(0)
        if isinstance(answer, RunFailed):
            raise answer
        return {"engine": self.name, "order": order, "wall_s": 2.0, "prompt_tokens": 7, "output_tokens": answer}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(compare, "add_floor", lambda runs, *_: [run.update(floor_s=1.0) for run in runs])
    return lambda *engines: compare.Comparison(list(engines), lambda: Rates(1.0, 1.0), None)


def test_engines_alternate_and_runs_carry_what_was_run(comparison: Any) -> None:
    running = comparison(FakeEngine("a", 3, 3), FakeEngine("b", 3, 3))
    runs = running.add(workload(), 2)
    assert [(run["round"], run["engine"]) for run in runs] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert {(run["file"], run["rows"], run["rows_per_s"], run["temperature"]) for run in runs} == {("tiny", 4, 2.0, 0.8)}
    assert running.failures == []


@pytest.mark.parametrize(("answer", "message"), [(RunFailed("b broke"), "b broke"), (2, "b did other work")])
def test_an_engine_that_fails_or_does_other_work_sits_out_that_file(comparison: Any, answer: Any, message: str) -> None:
    broken = FakeEngine("b", 3, answer, 3)
    running = comparison(FakeEngine("a", 3, 3, 3, 3), broken)
    runs = running.add(workload(), 3)
    assert [run["engine"] for run in runs] == ["a", "b", "a", "a"]
    assert broken.closed
    assert len(running.failures) == 1
    assert message in running.failures[0]
    assert [run["engine"] for run in running.add(workload(), 1)] == ["a", "b"]


def test_the_best_rates_seen_count_each_for_itself() -> None:
    assert compare.best_rates([Rates(1.0, 5.0), Rates(3.0, 4.0)]) == Rates(3.0, 5.0)


def test_workers_know_their_orders(tmp_path: Path) -> None:
    import worker

    requests = [
        {"ids": [2, 1], "max_tokens": 4, "n": 1},
        {"ids": [1, 9, 9], "max_tokens": 4, "n": 1},
        {"ids": [3], "max_tokens": 4, "n": 1},
    ]
    path = tmp_path / "requests.json"
    path.write_text(json.dumps(requests))
    order = {
        name: [requests.index(request) for request in worker.load_requests(str(path), name)]
        for name in ("given", "sorted", "length")
    }
    assert order == {"given": [0, 1, 2], "sorted": [1, 0, 2], "length": [2, 0, 1]}
    with pytest.raises(SystemExit, match="unknown order 'shuffled'"):
        worker.load_requests(str(path), "shuffled")


def test_batches_of_transformers_hold_rows_of_equal_samples_and_not_too_many() -> None:
    from transformers_offline import batches

    requests = [{"n": 1}] * 18 + [{"n": 16}] * 5 + [{"n": 100}] * 2
    assert [(batch[0]["n"], len(batch)) for batch in batches(requests)] == [(1, 16), (1, 2), (16, 4), (16, 1), (100, 1), (100, 1)]
