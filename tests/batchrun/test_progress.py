"""Progress on standard error: plain lines at most every few seconds, a bar on a terminal, nothing when quiet."""

import io
import os
import re
import subprocess
import sys

import pytest

from batchrun.progress import Progress, duration


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_for(progress: Progress, clock: Clock, seconds: int, total: int = 200) -> None:
    """Ten updates a second: 2 rows, 100 prompt tokens and 50 output tokens of each second."""
    for tick in range(seconds * 10):
        done = tick / 10
        progress.update(int(2 * done), total, 1, int(100 * done), 50 * total, int(50 * done), 25 * total - 50 * done, 64, 0.456)
        clock.now += 0.1


def test_plain_lines_are_at_least_an_interval_apart_and_carry_the_figures() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = Progress(stream=stream, interval=5.0, clock=clock)
    for phase in ("reading", "planning", "loading", "running"):
        progress.phase(phase)
        clock.now += 0.3
    run_for(progress, clock, 21)
    progress.close()
    lines = stream.getvalue().splitlines()
    # The first phase at once; then 5, 10, 15 and 20 seconds later.
    assert len(lines) == 5
    assert lines[0] == "batchrun: reading"
    last = lines[-1]
    assert last.startswith("batchrun: running: 38/200 rows, 1 failed, 19% of prompt tokens, prefill 100 tok/s, decode 50 tok/s, ")
    assert "64 running, KV 46%" in last
    assert last.endswith("1m 21s left")  # 100 s in all, 18.8 of them gone
    assert stream.getvalue().isascii()
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_speeds_follow_the_last_stretch() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = Progress(stream=stream, interval=1.0, clock=clock)
    for second in range(100):
        tokens = 1000 * min(second, 40)  # prefill ends after 40 s
        progress.update(0, 10, 0, tokens, 40_000, 10 * second, 1000 - 10 * second, 8, 0.5)
        clock.now += 1.0
    lines = stream.getvalue().splitlines()
    assert "prefill 1000 tok/s, decode 10 tok/s" in lines[35]
    assert "prefill 0 tok/s, decode 10 tok/s" in lines[-1]


def test_a_resumed_run_does_not_count_earlier_rows_as_its_own_speed() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = Progress(stream=stream, interval=10.0, clock=clock)
    for second in range(11):
        progress.update(500 + 5 * second, 1000, 0, 0, 0, 50 * second, 10 * (500 - 5 * second), 8, 0.5)
        clock.now += 1.0
    assert stream.getvalue().splitlines()[-1].endswith("1m 30s left")  # 450 rows at 5 a second


def test_rows_that_all_end_together_do_not_make_the_time_left_climb() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = Progress(stream=stream, interval=10.0, clock=clock)
    for second in range(101):  # 10 s of prompts, then 90 s of answers, of which none ends before the last step
        prompts, answers = 1000 * min(second, 10), 50 * max(second - 10, 0)
        progress.update(0, 200, 0, prompts, 10_000, answers, 4500 - answers, 200, 0.5)
        clock.now += 1.0
    shown = [re.search(r"(?:(\d+)m )?(\d+)s left", line) for line in stream.getvalue().splitlines()[1:]]
    told = [60 * int(found[1] or 0) + int(found[2]) for found in shown if found]
    assert told == [80, 70, 60, 50, 40, 30, 20, 10, 0]


def test_nothing_to_do_and_nothing_done_yet_show_no_time_left() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = Progress(stream=stream, interval=1.0, clock=clock)
    progress.update(0, 0, 0, 0, 0, 0, 0, 0, 0.0)
    clock.now += 2.0
    progress.update(0, 10, 0, 1, 1000, 0, 500, 4, 0.0)
    assert stream.getvalue().splitlines() == [
        "batchrun: 0/0 rows, 0 running, KV 0%",
        "batchrun: 0/10 rows, 0% of prompt tokens, prefill 0 tok/s, decode 0 tok/s, 4 running, KV 0%",
    ]


def test_quiet_shows_nothing() -> None:
    clock, plain, terminal = Clock(), io.StringIO(), Terminal()
    for stream in (plain, terminal):
        progress = Progress(quiet=True, stream=stream, clock=clock)
        progress.phase("running")
        run_for(progress, clock, 20)
        progress.close()
    assert plain.getvalue() == terminal.getvalue() == ""


def test_a_terminal_gets_a_bar_that_is_taken_away_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    clock, stream = Clock(), Terminal()
    with Progress(stream=stream, clock=clock) as progress:
        progress.phase("loading")
        progress.phase("running")
        run_for(progress, clock, 10)
    shown = stream.getvalue()
    assert "loading" in shown
    assert "19/200 rows, 1 failed, 9% of prompt tokens, prefill 100 tok/s, decode 50 tok/s" in shown
    assert shown.count("rows") <= 10 / 0.2 + 2
    assert "\x1b[2K" in shown[shown.rindex("rows") :]  # the line is cleared
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # and the cursor shown again
    progress.close()
    assert stream.getvalue() == shown


def test_without_a_terminal_rich_is_not_imported_and_c_locale_is_fine() -> None:
    code = (
        "import sys; from batchrun.progress import Progress; p = Progress(); p.phase('loading');"
        "p.update(1, 2, 0, 5, 10, 3, 9, 1, 0.5); p.close(); assert 'rich' not in sys.modules"
    )
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b""
    assert done.stderr == b"batchrun: loading\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.6, "9s"), (59.6, "1m 00s"), (185, "3m 05s"), (3600, "1h 00m"), (7625, "2h 07m")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
