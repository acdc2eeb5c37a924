"""What the peers' workers share. Runs in the peers' own environments, so it imports the standard library alone.

A worker loads its engine, prints `READY {json}` and then answers every line on stdin, a JSON object

    {"requests": path of a JSON list of {ids, max_tokens, n}, "order": "given" | "sorted" | "length", "temperature": 0.0}

with one line `RESULT {json}`. End of input ends it. What the engine itself prints goes to stderr, or is skipped by the reader.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def load_requests(path: str, order: str) -> list[dict]:
    """Read the requests and put them in order: as they are, by their token ids, or by output and prompt length."""
    requests = json.loads(Path(path).read_text())
    if order == "sorted":
        requests.sort(key=lambda request: request["ids"])
    elif order == "length":
        requests.sort(key=lambda request: (request["n"], request["max_tokens"], len(request["ids"])))
    elif order != "given":
        sys.exit(f"unknown order {order!r}")
    return requests


def jobs() -> Iterator[tuple[list[dict], float]]:
    """The requests, in order, and the temperature of every line of input."""
    for line in sys.stdin:
        job = json.loads(line)
        yield load_requests(job["requests"], job["order"]), job["temperature"]


def say(word: str, **values: object) -> None:
    """Print one line of the protocol."""
    print(word, json.dumps(values), flush=True)


def timed(work: Callable[[], object]) -> tuple[object, float]:
    """The result of `work` and its seconds."""
    started = time.perf_counter()
    result = work()
    return result, time.perf_counter() - started
