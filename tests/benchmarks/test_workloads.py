"""What the engines are given: the same rows, the same ids, the same lengths."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from chart import Line, line_chart, tick_step
from sharing_sweep import DATA, documents, questions, shared_rows, summary
from workloads import prepare, temperature_of, trimmed


def rows(**columns: list) -> pa.Table:
    texts = [f"question {number}" for number in (1, 2, 1)]
    messages = [[{"role": "user", "content": text}] for text in texts]
    return pa.table({"messages": messages, "max_tokens": pa.array([5, 9, 5], pa.int32()), **columns})


@pytest.mark.parametrize(
    ("table", "asked", "expected"),
    [
        (rows(), None, 0.0),
        (rows(n=[1, 1, 1]), None, 0.0),
        (rows(n=[1, 4, 1]), None, 0.8),
        (rows(n=[1, 4, 1]), 0.0, 0.0),
        (rows(), 0.3, 0.3),
    ],
)
def test_files_with_several_samples_are_drawn_and_all_others_greedy(
    table: pa.Table, asked: float | None, expected: float
) -> None:
    assert temperature_of(table, asked) == expected


def test_greedy_rows_lose_their_samples_and_outputs_can_be_capped() -> None:
    table = rows(n=[4, 4, 4])
    assert trimmed(table, 2, None, 0.8).num_rows == 2
    assert trimmed(table, 3, None, 0.8)["n"].to_pylist() == [4, 4, 4]
    assert "n" not in trimmed(table, 3, None, 0.0).column_names
    assert trimmed(table, 3, 6, 0.8)["max_tokens"].to_pylist() == [5, 6, 5]


@pytest.mark.parametrize(("n", "temperature", "computed_rows"), [([1, 1, 1], 0.0, 2), ([2, 1, 2], 0.8, 3)])
def test_a_workload_counts_all_rows_and_plans_the_distinct_ones(
    tmp_path: Path, tiny_model_folder: Path, n: list[int], temperature: float, computed_rows: int
) -> None:
    import pyarrow.parquet as pq

    pq.write_table(rows(n=n), tmp_path / "rows.parquet")
    (tmp_path / "inputs").mkdir()
    workload = prepare(tmp_path / "rows.parquet", str(tiny_model_folder), tmp_path / "inputs", 3, None, None)
    requests = json.loads(workload.requests.read_text())
    assert [(request["max_tokens"], request["n"]) for request in requests] == list(zip([5, 9, 5], n, strict=True))
    assert requests[0]["ids"] == requests[2]["ids"] != requests[1]["ids"]
    assert workload.prompt_tokens == sum(len(request["ids"]) for request in requests)
    assert workload.output_tokens == sum(request["max_tokens"] * request["n"] for request in requests)
    assert (workload.temperature, len(workload.plan.prompts)) == (temperature, computed_rows)
    assert workload.plan.trie.num_rows == computed_rows


def test_groups_of_the_sweep_share_a_document_and_nothing_else() -> None:
    prefixes, suffixes = documents(DATA / "summarize.parquet", 4200), questions(DATA / "rag.parquet")
    for group in (1, 4, 32):
        texts = [row[0]["content"] for row in shared_rows(prefixes, suffixes, 64, group, 32, seed=0)["messages"].to_pylist()]
        shared = [text.rpartition("\n\nQuestion: ")[0] for text in texts]
        assert sorted(map(shared.count, set(shared))) == [group] * (64 // group)
        assert len(set(texts)) == 64
    with pytest.raises(ValueError, match="64 rows cannot be dealt into groups of 5"):
        shared_rows(prefixes, suffixes, 64, 5, 32, seed=0)
    with pytest.raises(ValueError, match="4 rows want 4 documents and 4 questions: there are 1 and 4"):
        shared_rows(["a"], ["b"] * 4, 4, 1, 32, seed=0)


def test_the_sweep_shows_each_engine_at_its_better_order() -> None:
    common = {"prompt_tokens": 10, "distinct_tokens": 5, "floor_s": 1.0}
    runs = [
        {"rows_per_prefix": size, "engine": engine, "order": order, "wall_s": wall_s} | common
        for size, engine, order, wall_s in (
            (2, "batchrun", "given", 3.0),
            (1, "batchrun", "given", 4.0),
            (1, "vllm", "given", 9.0),
            (1, "vllm", "sorted", 8.0),
        )
    ]
    text, lines = summary(runs)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert cells[2:] == [["1", "10", "5", "4.0 (given)", "8.0 (sorted)", "1"], ["2", "10", "5", "3.0 (given)", "failed", "1"]]
    assert [(line.name, line.points) for line in lines] == [
        ("batchrun", [(1, 4.0), (2, 3.0)]),
        ("vllm", [(1, 8.0)]),
        ("floor", [(1, 1.0), (2, 1.0)]),
    ]


@pytest.mark.parametrize(("largest", "step"), [(6, 1), (6.1, 2), (60, 10), (25, 5), (0.5, 0.1)])
def test_ticks_are_round_and_at_most_six(largest: float, step: float) -> None:
    assert tick_step(largest) == pytest.approx(step)


def test_the_chart_draws_every_point_in_its_place() -> None:
    from xml.etree import ElementTree

    text = line_chart("a < b", "x", "y", [Line("one", [(4, 50), (1, 0)]), Line("two", [(2, 60)], dashed=True), Line("none", [])])
    picture = ElementTree.fromstring(text)
    dots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in picture.iter("{http://www.w3.org/2000/svg}circle")]
    assert sorted(dots) == [(60, 350), (315, 40), (570, 91.7)]
    strokes = [line.attrib["points"] for line in picture.iter("{http://www.w3.org/2000/svg}polyline")]
    assert strokes == ["315.0,40.0", "60.0,350.0 570.0,91.7"]
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "a < b" in texts
    assert "none" not in texts
