"""The kernels' own threads: any number of them, callers side by side, callers in a forked process."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from batchrun.kernels import native, native_linear

pytestmark = pytest.mark.usefixtures("compiled_kernel", "threads_as_before")


def layer(rows: int) -> tuple[torch.Tensor, native_linear.NativeLinear]:
    loaded = native.load()
    assert isinstance(loaded, native.Native), loaded
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(1000, 64, generator=generator).bfloat16()
    return torch.randn(rows, 64, generator=generator).bfloat16(), native_linear.pack(loaded, weight)


@pytest.mark.parametrize("threads", [2, 3, 7, 32])
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_every_task_is_done_once_by_any_number_of_threads(threads: int, rows: int) -> None:
    x, weight = layer(rows)
    torch.set_num_threads(1)
    alone = native_linear.linear(x, weight)
    torch.set_num_threads(threads)
    for _ in range(200):
        assert torch.equal(native_linear.linear(x, weight), alone)


def test_callers_side_by_side_get_their_own_results() -> None:
    torch.set_num_threads(2)
    jobs = [layer(rows) for rows in (3, 40, 170)]
    expected = [native_linear.linear(x, weight) for x, weight in jobs]
    wrong: list[int] = []

    def call(which: int) -> None:
        torch.set_num_threads(2)
        x, weight = jobs[which]
        wrong.extend(which for _ in range(300) if not torch.equal(native_linear.linear(x, weight), expected[which]))

    callers = [threading.Thread(target=call, args=(which,)) for which in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


FORKED = """
import os, sys, torch
sys.path.insert(0, {folder!r})
from test_threads import layer
from batchrun.kernels import native_linear
torch.set_num_threads(2)
x, weight = layer(170)
def result():  # as bytes: torch's own threads do not come along
    return native_linear.linear(x, weight).view(torch.int16).numpy().tobytes()
before = result()
child = os.fork()
if not child:
    os._exit(0 if all(result() == before for _ in range(100)) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), result() == before)
"""


def test_a_forked_process_computes_the_same() -> None:
    script = FORKED.format(folder=os.path.dirname(__file__))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.split(), done.returncode) == (["0", "True"], 0), done.stderr
