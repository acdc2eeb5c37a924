"""What transformers answers, row by row: the truth that `parity.py` compares batchrun with.

A reference file is JSON lines. The first line names model, data file and cap; then one line per row, written as the row
finishes, so that a broken run goes on where it stopped.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import xxhash


@dataclass(frozen=True, slots=True)
class ReferenceRow:
    """Greedy float32 answer of one row, computed alone."""

    row: int
    prompt_ids: list[int]
    output_ids: list[int]
    """The end token included where there was one; at most `max_tokens` of them."""
    gaps: list[float]
    """Per output position: best logit minus second best."""
    max_tokens: int
    """The row's own limit, or the cap if that is less."""


def content_hash(path: Path) -> str:
    """xxh3 of a file's bytes, hexadecimal."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def read_rows(data: Path, rows: int) -> list[dict[str, Any]]:
    """Return the first `rows` rows of a Parquet file."""
    return pq.read_table(data).slice(0, rows).to_pylist()


def reference_path(folder: Path, data: Path) -> Path:
    return folder / f"{data.stem}.jsonl"


def read_reference(path: Path) -> tuple[dict[str, Any], list[ReferenceRow]]:
    """Return (header, rows in file order); a last line cut short by a kill is left out."""
    complete = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    if not complete:
        raise SystemExit(f"{path} is empty: write it with `parity.py reference`")
    return json.loads(complete[0]), [ReferenceRow(**json.loads(line)) for line in complete[1:]]


def write_reference(model_folder: Path, data: list[Path], folder: Path, rows: int, cap: int, threads: int) -> None:
    """Write one reference file per data file into `folder`, leaving out the rows that are there already.

    Args:
        model_folder: Hugging Face folder; its weights are used in float32 whatever they are stored in.
        cap: most output tokens of a row.

    Raises:
        SystemExit: a file in `folder` comes from another model, data file or cap.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    weights = "-".join(content_hash(path) for path in sorted(model_folder.glob("*.safetensors")))
    for source in data:
        path = reference_path(folder, source)
        header = {"weights": weights, "data": content_hash(source), "cap": cap}
        done = _open_reference(path, header)
        for reference in _generate(model, tokenizer, source, rows, cap, done):
            with path.open("a") as file:
                file.write(json.dumps(asdict(reference)) + "\n")


def _open_reference(path: Path, header: dict[str, Any]) -> set[int]:
    """Return the rows that `path` holds; start it, or cut a half-written last line off, where needed."""
    if not path.exists():
        path.write_text(json.dumps(header) + "\n")
        return set()
    found, done = read_reference(path)
    if found != header:
        differing = [key for key in header if found.get(key) != header[key]]
        raise SystemExit(f"{path} was made with another {' and '.join(differing)}: remove it or choose another folder")
    text = path.read_text()
    path.write_text(text[: text.rindex("\n") + 1])
    return {row.row for row in done}


def _generate(model: Any, tokenizer: Any, source: Path, rows: int, cap: int, done: set[int]) -> Iterator[ReferenceRow]:
    import torch

    for index, row in enumerate(read_rows(source, rows)):
        if index in done:
            continue
        began = time.perf_counter()
        text = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        limit = min(row["max_tokens"], cap)
        with torch.inference_mode():
            out = model.generate(
                **prompt, max_new_tokens=limit, do_sample=False, return_dict_in_generate=True, output_logits=True
            )
        prompt_ids = prompt["input_ids"][0].tolist()
        best = torch.stack(out.logits)[:, 0].topk(2).values
        yield ReferenceRow(
            row=index,
            prompt_ids=prompt_ids,
            output_ids=out.sequences[0, len(prompt_ids) :].tolist(),
            gaps=(best[:, 0] - best[:, 1]).tolist(),
            max_tokens=limit,
        )
        print(f"{source.stem} row {index}: {len(prompt_ids)} prompt tokens, {time.perf_counter() - began:.1f} s", flush=True)


def bfloat16_gaps(model_folder: Path, rows: list[ReferenceRow], threads: int) -> list[list[float]]:
    """Where transformers itself, in bfloat16 and fed each row's float32 answer, would choose another token.

    Returns the reference's gap at each such position, row by row: how far rounding alone moves two logits apart, by an
    implementation that is not ours.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).eval()
    found = []
    for row in rows:
        ids = torch.tensor([row.prompt_ids + row.output_ids[:-1]])
        with torch.inference_mode():
            best = model(ids, logits_to_keep=len(row.output_ids)).logits[0].argmax(dim=-1).tolist()
        pairs = zip(best, row.output_ids, row.gaps, strict=True)
        found.append([gap for mine, theirs, gap in pairs if mine != theirs])
    return found
