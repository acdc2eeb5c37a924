"""How far a run is, on standard error: a live bar on a terminal, otherwise a plain line every few seconds."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self, TextIO

from batchrun.time_left import TimeLeft

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

PHASES = ("reading", "loading", "planning", "running", "writing")
_WINDOW_S = 30.0  # speeds are those of this last stretch
_REDRAW_S = 0.2  # the engine steps more often than anybody can read


@dataclass(frozen=True, slots=True)
class Counts:
    """Where the run stands."""

    done_rows: int
    total_rows: int
    failed: int
    prompt_tokens_done: int
    prompt_tokens_total: int
    output_tokens: int
    output_tokens_left: float
    running: int
    kv_used_share: float

    @property
    def share(self) -> float:
        """Share of the job that is done: the mean of the rows' and the prompt tokens', since prefill runs ahead of the rows."""
        rows = self.done_rows / self.total_rows if self.total_rows else 1.0
        return (rows + (self.prompt_tokens_done / self.prompt_tokens_total if self.prompt_tokens_total else rows)) / 2


class Speed(NamedTuple):
    """Over the last stretch; None while there is nothing to tell from."""

    prefill: float | None
    """Prompt tokens per second."""
    decode: float | None
    """Output tokens per second."""
    left_s: float | None


class Meter:
    """Speeds and the time left, from counts at their times."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Counts]] = deque()
        self._time_left = TimeLeft()

    def add(self, now: float, counts: Counts) -> None:
        self._time_left.add(now, counts.prompt_tokens_done, counts.output_tokens)
        # One sample a second is enough, and the oldest one kept lies just outside the window.
        if not self._seen or now - self._seen[-1][0] >= 1.0:
            self._seen.append((now, counts))
            while len(self._seen) > 2 and now - self._seen[1][0] >= _WINDOW_S:
                self._seen.popleft()

    def speed(self, now: float, counts: Counts) -> Speed:
        if now <= self._seen[0][0]:
            return Speed(None, None, None)
        before, old = self._seen[0]
        elapsed = now - before
        prefill = (counts.prompt_tokens_done - old.prompt_tokens_done) / elapsed
        decode = (counts.output_tokens - old.output_tokens) / elapsed
        prompt_tokens_left = counts.prompt_tokens_total - counts.prompt_tokens_done
        return Speed(prefill, decode, self._time_left.seconds(prompt_tokens_left, counts.output_tokens_left))


class Progress:
    """Shows phases and counts; every call is cheap, and nothing happens between calls (no thread).

    Args:
        quiet: show nothing.
        stream: standard error when None.
        interval: least seconds between two plain lines.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        quiet: bool = False,
        stream: TextIO | None = None,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._quiet = quiet
        self._interval = interval
        self._clock = clock
        self._phase = ""
        self._meter = Meter()
        self._shown_at: float | None = None
        self._live = not quiet and self._stream.isatty()
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def phase(self, name: str) -> None:
        """The run enters a phase, one of PHASES."""
        assert name in PHASES, name
        self._phase = name
        if self._quiet:
            return
        now = self._clock()
        if self._live:
            with self._going_quiet():
                self._draw(now, name, None)
        elif self._due(now, self._interval):
            self._print(name)

    def update(
        self,
        done_rows: int,
        total_rows: int,
        failed: int,
        prompt_tokens_done: int,
        prompt_tokens_total: int,
        output_tokens: int,
        output_tokens_left: float,
        running: int,
        kv_used_share: float,
    ) -> None:
        """Counts so far.

        Args:
            done_rows: rows finished, failed ones and those of a run that is being resumed included.
            total_rows: rows of the input.
            failed: rows that ended in an error.
            prompt_tokens_done: prompt tokens computed.
            prompt_tokens_total: prompt tokens to compute.
            output_tokens: tokens generated.
            output_tokens_left: tokens that are expected still to be.
            running: sequences being decoded.
            kv_used_share: share of the KV pool in use, 0 to 1.
        """
        if self._quiet:
            return
        now = self._clock()
        counts = Counts(
            done_rows,
            total_rows,
            failed,
            prompt_tokens_done,
            prompt_tokens_total,
            output_tokens,
            output_tokens_left,
            running,
            kv_used_share,
        )
        self._meter.add(now, counts)
        if not self._due(now, _REDRAW_S if self._live else self._interval):
            return
        text = describe(counts, self._meter.speed(now, counts))
        if self._live:
            with self._going_quiet():
                self._draw(now, text, counts)
        else:
            self._print(f"{self._phase}: {text}" if self._phase else text)

    def close(self) -> None:
        """Take the bar off the terminal; may be called twice."""
        if self._bar is not None:
            with self._going_quiet():
                self._bar.stop()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _due(self, now: float, interval: float) -> bool:
        """Whether to show something now, which is then noted."""
        if self._shown_at is not None and now - self._shown_at < interval:
            return False
        self._shown_at = now
        return True

    def _print(self, text: str) -> None:
        with self._going_quiet():
            print(f"batchrun: {text}", file=self._stream, flush=True)

    @contextmanager
    def _going_quiet(self) -> Iterator[None]:
        """Whoever read the progress may leave, or the log's disk fill up: the job goes on without."""
        try:
            yield
        except OSError:
            self._quiet = True

    def _draw(self, now: float, text: str, counts: Counts | None) -> None:
        self._shown_at = now
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.fields[phase]}"), BarColumn(20), TextColumn("{task.fields[text]}"))
            self._bar = Bar(*columns, console=Console(file=self._stream), auto_refresh=False, transient=True)
            self._task = self._bar.add_task("", total=None, phase=self._phase, text="")
            self._bar.start()
        assert self._task is not None
        total, completed = (None, 0.0) if counts is None else (1.0, counts.share)
        shown = "" if counts is None else text
        self._bar.update(self._task, total=total, completed=completed, phase=self._phase, text=shown, refresh=True)


def describe(counts: Counts, speed: Speed) -> str:
    """One line, ASCII only."""
    parts = [f"{counts.done_rows}/{counts.total_rows} rows"]
    if counts.failed:
        parts.append(f"{counts.failed} failed")
    if counts.prompt_tokens_total:
        parts.append(f"{100 * counts.prompt_tokens_done // counts.prompt_tokens_total}% of prompt tokens")
    if speed.prefill is not None and speed.decode is not None:
        parts.append(f"prefill {speed.prefill:.0f} tok/s")
        parts.append(f"decode {speed.decode:.0f} tok/s")
    parts.append(f"{counts.running} running")
    parts.append(f"KV {counts.kv_used_share:.0%}")
    if speed.left_s is not None:
        parts.append(f"{duration(speed.left_s)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Such as 9s, 3m 05s, 2h 07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
