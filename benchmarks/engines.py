"""The engines that can be compared, each run in processes and an environment of its own.

An engine is opened once and then asked for runs. One that loads for a minute stays, idle, between its runs; the others are
processes that end with the run. Peak memory is the sum of the largest resident sets of the run's processes.
"""

import json
import os
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes.util import find_library
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, Protocol

from processes import Disturbance, cpu_s, reset_peaks, sum_of_peaks
from results import RunFailed, run_batchrun
from workloads import Workload

PEERS = Path(__file__).parent / "peers"
SUMMARY_PARTS = ("read_s", "plan_s", "run_s")
OURS = {
    "batchrun": [],
    "batchrun-no-dedupe": ["--no-dedupe"],
    "batchrun-unshared": ["--no-prefix-cache", "--no-dedupe"],
}


class EngineMissing(Exception):
    """The engine cannot be run here; the message says why and what to do."""


@dataclass(frozen=True)
class Settings:
    """What the engines are opened with."""

    model: str
    """Hugging Face folder with bfloat16 weights."""
    threads: int
    pythons: dict[str, Path] = field(default_factory=dict)
    """By engine, the Python of its environment."""
    openvino_model: Path | None = None
    """The same weights in OpenVINO's format."""
    kv_gib: int = 8
    """Of the peers that must be told; batchrun takes its own default."""
    batchrun_options: Sequence[str] = ()
    logs: Path = Path()
    """Folder for what the peers print on stderr."""
    peer_orders: tuple[str, ...] = ("given", "sorted")
    """Orders of the rows that each round tries, of the peers to which it matters."""


class Engine(Protocol):
    """One competitor."""

    name: str
    orders: tuple[str, ...]
    """Orders of the rows that each round tries."""

    def run(self, workload: Workload, order: str) -> dict[str, Any]:
        """Run a workload once: engine, order, wall_s without model load, load_s, prompt_tokens, output_tokens, cached_tokens,
        peak_rss_bytes, others_cpu_share (of the machine, by other programs), version, command, and whatever else is known.

        Raises:
            RunFailed: it ended badly.
        """
        ...

    def close(self) -> None: ...


class Ours:
    """`batchrun run`, a new process every time. The time is the summary's read_s + plan_s + run_s."""

    orders = ("given",)

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        fixed = ["--model", settings.model, "--device", "cpu", "--dtype", "bfloat16", "--ignore-eos"]
        self._options = [*fixed, "--threads", str(settings.threads), *OURS[name], *settings.batchrun_options]

    def run(self, workload: Workload, order: str) -> dict[str, Any]:
        options = [*self._options, "--temperature", str(workload.temperature)]
        others = Disturbance(_ended_children_s())
        run = run_batchrun(workload.data, options)
        summary = run.summary
        if summary["failed"]:
            raise RunFailed(f"{self.name}: {summary['failed']} rows of {workload.name} failed")
        return {
            "engine": self.name,
            "order": order,
            "wall_s": sum(summary[part] for part in SUMMARY_PARTS),
            **{part: summary[part] for part in SUMMARY_PARTS},
            "load_s": summary["load_s"],
            "process_s": run.wall_s,
            "prompt_tokens": summary["prompt_tokens"],
            "output_tokens": summary["output_tokens"],
            "cached_tokens": summary["prompt_tokens"] - summary["computed_prompt_tokens"] + summary["recomputed_tokens"],
            "peak_rss_bytes": run.peak_rss_bytes,
            "others_cpu_share": others.share(_ended_children_s()),
            "version": version("batchrun"),
            "command": shlex.join(["batchrun", "run", workload.data.name, *options]),
        }

    def close(self) -> None:
        pass


def _ended_children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class Peer:
    """A worker of peers/ in the peer's own environment; see peers/worker.py for what is said between us.

    Raises:
        EngineMissing: no Python is given for it, there is none at that place, or it cannot import the module.
    """

    def __init__(self, name: str, module: str, script: str, orders: tuple[str, ...], settings: Settings, resident: bool) -> None:
        python = settings.pythons.get(name)
        if python is None:
            raise EngineMissing(f"no environment is named: give --python {name}=VENV/bin/python")
        if not python.exists():
            raise EngineMissing(f"there is no Python at {python}")
        probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        if subprocess.run([python, "-c", probe], check=False).returncode:
            raise EngineMissing(f"{python} has no module {module}")
        self.name, self.orders, self._resident = name, orders, resident
        self._command = [str(python), str(PEERS / script)]
        self._environment = dict(os.environ, HF_HUB_OFFLINE="1")
        self._columns: dict[str, Any] = {}
        self._log = settings.logs / f"{name}.log"
        self._process: subprocess.Popen[str] | None = None
        self._ready: dict[str, Any] = {}

    def with_options(self, *options: str) -> "Peer":
        self._command += options
        return self

    def with_environment(self, **values: str) -> "Peer":
        self._environment.update(values)
        self._columns["environment"] = json.dumps(values)
        return self

    def run(self, workload: Workload, order: str) -> dict[str, Any]:
        process = self._process or self._start()
        try:
            reset_peaks(process.pid)
            others = Disturbance(cpu_s(process.pid))
            job = {"requests": str(workload.requests), "order": order, "temperature": workload.temperature}
            with suppress(BrokenPipeError):  # then _read says how the worker ended
                stdin = _opened(process.stdin)
                stdin.write(json.dumps(job) + "\n")
                stdin.flush()
            result = self._read(process, "RESULT ")
            # Read before the worker ends and takes the figures with it.
            measured = {"peak_rss_bytes": sum_of_peaks(process.pid), "others_cpu_share": others.share(cpu_s(process.pid))}
        finally:
            if not self._resident or process.poll() is not None:
                self.close()
        own = {"engine": self.name, "order": order, "command": shlex.join(self._command)}
        return own | measured | self._columns | self._ready | result

    def close(self) -> None:
        if (process := self._process) is None:
            return
        self._process = None
        with suppress(BrokenPipeError):  # it is gone already
            _opened(process.stdin).close()
        try:
            process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _opened(process.stdout).close()

    def _start(self) -> "subprocess.Popen[str]":
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a") as log:
            self._process = process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=self._environment
            )
        self._ready = self._read(process, "READY ")
        return process

    def _read(self, process: "subprocess.Popen[str]", prefix: str) -> dict[str, Any]:
        for line in _opened(process.stdout):
            if line.startswith(prefix):
                values: dict[str, Any] = json.loads(line.removeprefix(prefix))
                return values
        raise RunFailed(f"{self.name} ended with exit code {process.wait()}: see {self._log}")


def _opened(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "the worker is started with pipes"
    return pipe


def vllm(settings: Settings) -> Engine:
    """vLLM at its best on a CPU: all cores bound, tcmalloc and Intel's OpenMP preloaded where both are found.

    It loads for a minute, so it stays; `VLLM_CPU_OMP_THREADS_BIND` takes cores, not a count.
    """
    peer = Peer("vllm", "vllm", "vllm_offline.py", settings.peer_orders, settings, resident=True)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: settings.threads]))
    peer.with_options("--model", settings.model)
    tuning = {"VLLM_CPU_KVCACHE_SPACE": str(settings.kv_gib), "VLLM_CPU_OMP_THREADS_BIND": cores}
    omp, tcmalloc = settings.pythons["vllm"].parent.parent / "lib" / "libiomp5.so", find_library("tcmalloc_minimal")
    if tcmalloc is None or not omp.exists():
        print("vllm runs without libtcmalloc_minimal or libiomp5, so not at its best")
    else:
        tuning["LD_PRELOAD"] = f"{tcmalloc}:{omp}"
    return peer.with_environment(**tuning)


def openvino(settings: Settings) -> Engine:
    """OpenVINO GenAI's continuous batching with its prefix cache, which only a new process empties."""
    peer = Peer("openvino", "openvino_genai", "openvino_offline.py", settings.peer_orders, settings, resident=False)
    folder = settings.openvino_model
    if folder is None or not folder.is_dir():
        how = "optimum-cli export openvino --model MODEL --task text-generation-with-past --weight-format fp16 FOLDER"
        raise EngineMissing(f"it needs the model in its own format: run `{how}` and give --openvino-model FOLDER")
    return peer.with_options("--model", str(folder), "--threads", str(settings.threads), "--kv-gib", str(settings.kv_gib))


def transformers(settings: Settings) -> Engine:
    """transformers' `generate` over batches of rows of like length; by default in our own environment."""
    own = replace(settings, pythons={"transformers": Path(sys.executable), **settings.pythons})
    peer = Peer("transformers", "transformers", "transformers_offline.py", ("length",), own, resident=False)
    return peer.with_options("--model", settings.model, "--threads", str(settings.threads))


def _ours(name: str) -> Callable[[Settings], Engine]:
    return lambda settings: Ours(name, settings)


ENGINES: dict[str, Callable[[Settings], Engine]] = {
    **{name: _ours(name) for name in OURS},
    "vllm": vllm,
    "openvino": openvino,
    "transformers": transformers,
}


def open_engines(names: Sequence[str], settings: Settings) -> list[Engine]:
    """The engines that can be run here, in the order of their names; each other one is named in one line."""
    opened: list[Engine] = []
    for name in dict.fromkeys(names):
        try:
            opened.append(ENGINES[name](settings))
        except EngineMissing as missing:
            print(f"skipped {name}: {missing}", flush=True)
    return opened
