"""Finding and reading safetensors files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchrun.engine.errors import ModelError
from batchrun.engine.weights import SafetensorsSource, weight_files, write_safetensors

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1.5, -0.1]), "c": torch.linspace(-1, 1, 5)}


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "model-00002-of-00002.safetensors")
    places = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    files = weight_files(tmp_path)
    assert [path.name for path in files] == sorted(places.values())
    source = SafetensorsSource(files)
    assert set(source.names()) == {"a", "b"}
    assert torch.equal(source.get("a"), TENSORS["a"])
    assert torch.equal(source.get("b"), TENSORS["b"])
    files[1].unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00002\.safetensors"):
        weight_files(tmp_path)


def test_a_single_file_is_found(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_other_formats_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"no model\.safetensors .*it has pytorch_model\.bin"):
        weight_files(tmp_path)


def test_a_cut_file_is_refused_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read as safetensors .*is it cut"):
        SafetensorsSource([path])
    with pytest.raises(ModelError, match="cannot be read"):
        SafetensorsSource([tmp_path / "missing.safetensors"])


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="no tensor 'lm_head"):
        SafetensorsSource([tmp_path / "model.safetensors"]).get("lm_head.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_written_files_are_read_by_the_safetensors_library(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    write_safetensors(tmp_path / "copy.safetensors", SafetensorsSource([tmp_path / "model.safetensors"]), dtype)
    copy = load_file(tmp_path / "copy.safetensors")
    assert set(copy) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert copy[name].dtype == dtype
        assert torch.equal(copy[name], tensor.to(dtype))
