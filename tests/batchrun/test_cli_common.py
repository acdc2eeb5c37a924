"""What click's values become."""

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from batchrun.cli.common import (
    EngineLimits,
    ModelChoice,
    engine_options,
    model_options,
    parse_names,
    prompt_options,
    sampling_options,
)
from batchrun.engine.sampling_params import SamplingParams
from batchrun.options import PromptOptions, RunOptions, parse_size


def parsed(*arguments: str) -> dict[str, Any]:
    """What a command with all the shared options gets."""
    got: dict[str, Any] = {}

    @click.command()
    @model_options
    @prompt_options
    @sampling_options
    @engine_options
    def command(**values: Any) -> None:
        got.update(values)

    CliRunner().invoke(command, list(arguments), catch_exceptions=False, standalone_mode=False)
    return got


def test_no_options_give_the_defaults_of_the_dataclasses() -> None:
    got = parsed()
    run = RunOptions(inputs=("a",), output=Path("b"))
    assert got["prompt"] == PromptOptions() == run.prompt
    assert got["sampling"] == SamplingParams() == run.sampling
    for name, value in (got["model"].fields() | got["engine"].fields()).items():
        assert getattr(run, name) == value, name
    assert set(got) == {"prompt", "sampling", "model", "engine"}


def test_every_option_reaches_its_field(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("é {{ a }}", encoding="utf-8")
    got = parsed(
        *("--tools-column", "t", "--template", str(template), "--system", "be kind"),
        *("--max-tokens", "7", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "3", "--min-p", "0.1"),
        *("--repetition-penalty", "1.1", "--presence-penalty", "0.2", "--frequency-penalty", "0.3", "--n", "2"),
        *("--stop", "\\n", "--stop", "end", "--include-stop", "--ignore-eos"),
        *("--model", "m", "--device", "cpu", "--dtype", "float32", "--threads", "2"),
        *(
            "--kv-memory",
            "1.5GiB",
            "--kv-dtype",
            "int8",
            "--chunk-tokens",
            "64",
            "--max-running",
            "9",
            "--order",
            "given",
            "--no-dedupe",
            "--no-prefix-cache",
        ),
    )
    assert got["prompt"] == PromptOptions(tools_column="t", template="é {{ a }}", system="be kind")
    assert got["sampling"] == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        n=2,
        stop=("\\n", "end"),
        include_stop=True,
        ignore_eos=True,
    )
    assert got["model"] == ModelChoice("m", "cpu", "float32", 2)
    assert got["engine"] == EngineLimits(None, 3 * 2**29, "int8", 64, 9, "given", False, False)
    assert parsed("--prompt-column", "q", "--raw")["prompt"] == PromptOptions(prompt_column="q", raw=True)
    assert parsed("--messages-column", "m")["prompt"] == PromptOptions(messages_column="m")
    assert parsed("--kv-tokens", "5")["engine"].kv_tokens == 5


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 2**32),
        ("512MB", 512 * 10**6),
        ("1073741824", 2**30),
        ("1.5 gb", 1_500_000_000),
        ("7b", 7),
        ("2TiB", 2**41),
        ("3KB", 3000),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4G", "-1GB", "1e9", "4 GiB more", "nan"])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is no amount of memory"):
        parse_size(text)


@given(st.integers(0, 2**60), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_whole_sizes_are_exact(number: int, unit: str) -> None:
    power = {"KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}[unit]
    assert parse_size(f"{number}{unit}") == number << power


def test_names_are_split_at_commas_outside_quotes() -> None:
    assert parse_names("a,b") == ("a", "b")
    assert parse_names('"a,b", c') == ("a,b", "c")
    assert parse_names("") == ()
    with pytest.raises(click.BadParameter, match="empty name"):
        parse_names("a,,b")


def test_a_template_that_is_not_utf8_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_bytes(b"ab\xff")
    with pytest.raises(Exception, match=r"--template is .*t\.jinja.* not UTF-8 text: byte 2"):
        parsed("--template", str(path))


def test_sizes_beyond_the_precision_of_decimals_are_exact() -> None:
    assert parse_size("18014398509481161TiB") == 18014398509481161 << 40
