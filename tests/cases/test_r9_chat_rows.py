"""Chats in a Parquet column reach the model as they were meant, however Arrow stores them (case R9)."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchrun.engine.loader import load_tokenizer, resolve_model
from batchrun.options import PromptOptions

HI_IDS = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198]
HI_IDS += [1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198]
HI = [{"role": "user", "content": "hi"}]


def with_tool_call(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Is it dry in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "name": "weather", "tool_call_id": "c1"},
    ]


ROWS = [HI, with_tool_call('{"city": "Rome"}')]
AWARE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**turn, "content": turn["content"] and [{"type": "text", "text": turn["content"]}]} for turn in messages]


def test_the_same_chats_in_four_kinds_of_column(run_job: Callable[..., Any], embedded_model: Path) -> None:
    _, tokenizer = load_tokenizer(resolve_model(str(embedded_model)))
    structs = pa.array(ROWS)
    assert {"tool_calls", "name"} <= {field.name for field in structs.type.value_type}
    columns = [structs, pa.array([json.dumps(row) for row in ROWS]), pa.array([in_parts(row) for row in ROWS])]
    columns.append(structs.cast(pa.large_list(structs.type.value_type)))
    outcomes = [
        run_job(pa.table({"messages": column}), model=embedded_model, prompt=PromptOptions(), max_tokens=4) for column in columns
    ]
    for outcome in outcomes:
        assert outcome.column("error") == [None, None]
        assert outcome.rows[0]["prompt_tokens"] == 31
        assert outcome.plan.prompts.token_ids(0).tolist() == HI_IDS
        assert outcome.plan.prompts.token_ids(1).tolist() == outcomes[0].plan.prompts.token_ids(1).tolist()
        assert outcome.ids == outcomes[0].ids
        assert any("tool_calls" in warning for warning in outcome.warnings)
    text = tokenizer.decode(outcomes[0].plan.prompts.token_ids(1).tolist(), skip_special=False)
    assert "None" not in text
    assert "null" not in text
    assert "<|im_start|>assistant\n<|im_end|>" in text
    assert "sunny" in text


def test_tools_that_the_template_ignores_are_warned_of(run_job: Callable[..., Any], embedded_model: Path) -> None:
    table = pa.table({"messages": [HI, HI], "tools": ['[{"type": "function", "function": {"name": "f"}}]', None]})
    outcome = run_job(table, model=embedded_model, prompt=PromptOptions(), max_tokens=1)
    assert outcome.warnings == ["1 row has tools, which the model's chat template ignores"]
    assert outcome.plan.prompts.token_ids(0).tolist() == HI_IDS


def test_tools_with_different_keys_keep_no_null_members(
    run_job: Callable[..., Any], tiny_model_folder: Path, tmp_path: Path
) -> None:
    model = tmp_path / "aware"
    shutil.copytree(tiny_model_folder, model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": AWARE}))
    _, tokenizer = load_tokenizer(resolve_model(str(model)))
    tools = [
        [{"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}],
        [{"type": "function", "function": {"name": "clock", "strict": True, "parameters": {"zone": {"enum": ["UTC"]}}}}],
    ]
    outcomes = []
    for arguments in ({"city": "Rome"}, '{"city": "Rome"}'):
        table = pa.table({"messages": [with_tool_call(arguments)] * 2, "tools": tools})
        outcomes.append(run_job(table, model=model, prompt=PromptOptions(), max_tokens=1))
    texts = [tokenizer.decode(outcomes[0].plan.prompts.token_ids(row).tolist(), skip_special=False) for row in (0, 1)]
    for text, schema in zip(texts, tools, strict=True):
        assert "null" not in text
        assert "None" not in text
        assert json.loads(text.splitlines()[0]) == schema
        assert '{"city": "Rome"}' in text
    by_dict, by_text = ([outcome.plan.prompts.token_ids(row).tolist() for row in (0, 1)] for outcome in outcomes)
    assert by_dict == by_text
    assert outcomes[0].warnings == []
