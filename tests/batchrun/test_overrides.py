"""Columns that look as if they were meant to set something, and set nothing."""

import pyarrow as pa
import pytest

from batchrun.engine.sampling_params import SamplingParams
from batchrun.options import PromptOptions
from batchrun.rows import RowReader


def warnings_of(*names: str, prompt: PromptOptions | None = None, **options) -> list[str]:
    schema = pa.schema([(name, pa.string()) for name in ("prompt", *names)])
    return RowReader(schema, prompt or PromptOptions(), SamplingParams(), **options).warnings


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("Temperature", "temperature"),
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("topk", "top_k"),
        ("Seed", "seed"),
        ("repitition_penalty", "repetition_penalty"),
        ("repeat_penalty", "repetition_penalty"),
    ],
)
def test_a_misspelt_setting_column_is_told(name, meant):
    assert warnings_of("id", name) == [
        f"the column '{name}' sets nothing: name it '{meant}' if it is to set --{meant.replace('_', '-')} per row"
    ]
    assert warnings_of(name, prompt=PromptOptions(template="{{ x }}"), template_columns=frozenset([name])) == []


def test_ordinary_columns_are_carried_over_without_a_word():
    ordinary = ["top", "name", "N", "id", "step", "stops", "shop", "need", "seeds", "topic", "weight", "tags", "temp", "tokens"]
    ordinary += [
        "min",
        "max",
        "num_tokens",
        "prompt_tokens",
        "output_tokens",
        "penalty",
        "frequency",
        "text",
        "repetition",
        "top_n",
    ]
    assert warnings_of(*ordinary) == []
    settings = pa.schema([("prompt", pa.string()), ("temperature", pa.float64()), ("max_tokens", pa.int64()), ("n", pa.int64())])
    assert RowReader(settings, PromptOptions(), SamplingParams()).warnings == []


def test_tools_beside_raw_prompts_are_told():
    (warning,) = warnings_of("tools", prompt=PromptOptions(raw=True))
    assert "'tools' is not used: --raw" in warning
    assert warnings_of("tools") == []
