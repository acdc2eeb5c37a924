"""Small GGUF files written by the `gguf` package, read by us and by transformers; and the cache of conversions."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file

from batchrun.engine import conversion
from batchrun.engine.conversion import ConvertedModel, cache_folder
from batchrun.engine.errors import ModelError
from batchrun.engine.gguf_file import GgufFile, hf_name, unpermute
from batchrun.engine.loader import ModelSource, load_model, load_tokenizer
from batchrun.kernels import ops

Array = npt.NDArray[np.float32]
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 2, 64, 96, 4, 2, 16
TYPES = gguf.GGMLQuantizationType


def permute(rows: Array, heads: int) -> Array:
    """Head by head and row by row, what llama.cpp's converter does: pairs (i, i + d/2) become neighbours."""
    size = len(rows) // heads
    result = np.empty_like(rows)
    for head in range(heads):
        for i in range(size // 2):
            result[head * size + 2 * i] = rows[head * size + i]
            result[head * size + 2 * i + 1] = rows[head * size + size // 2 + i]
    return result


def write_gguf(path: Path, weights: dict[str, Array], folder: Path, quantisation: str = "F32", **metadata: Any) -> Path:
    """Write the tiny model as llama.cpp's converter would: its names, its row order, 2-D weights quantised."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]
    writer.add_vocab_size(len(vocabulary["vocab"]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(metadata.pop("pre", "smollm"))
    writer.add_token_list(list(vocabulary["vocab"]))
    writer.add_token_types([3, 3, 3] + [1] * (len(vocabulary["vocab"]) - 3))
    writer.add_token_merges([" ".join(merge) for merge in vocabulary["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, array in weights.items():
        heads = HEADS if ".q_proj." in name else KV_HEADS if ".k_proj." in name else 0
        rows = permute(array, heads) if heads else array
        kind = TYPES[quantisation] if rows.ndim == 2 else TYPES.F32
        target = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        writer.add_tensor(target, gguf.quants.quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache for each test, and one thread, so that busy machines do not spin."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def weights(tiny_model_folder: Path) -> dict[str, Array]:
    """The shared tiny model's weights, the inner size cut to a multiple of a quantisation block that is not the hidden size."""
    tensors = load_file(tiny_model_folder / "model.safetensors")
    for name, array in tensors.items():
        if ".gate_proj." in name or ".up_proj." in name:
            tensors[name] = array[:INNER]
        elif ".down_proj." in name:
            tensors[name] = np.ascontiguousarray(array[:, :INNER])
    return tensors


def logits(path: Path, ids: list[int], dtype: str = "float32") -> torch.Tensor:
    model = load_model(ModelSource(path, "gguf", "tiny"), "cpu", dtype)
    shape = ops.KVConfig(LAYERS, HEADS, KV_HEADS, HEAD_DIM, model.dtype)
    kv = ops.allocate_kv(shape, -(-len(ids) // ops.page_size("cpu")))
    count = torch.arange(len(ids))
    plan = ops.build_plan(kv, [ops.AttentionItem(0, len(ids), [(0, len(ids))], len(ids), True)], len(ids))
    return model.decoder.forward(torch.tensor(ids), count, count, kv, plan, count)


IDS = [5, 250, 17, 3, 99, 140, 141, 5, 5, 200, 31, 7]


def read_by_transformers(path: Path) -> Any:
    """transformers' Llama with the config and tensors that its own GGUF reader makes of the file."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = load_gguf_checkpoint(str(path))["config"]
    model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == ([], [])
    return model


@pytest.mark.parametrize("quantisation", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_logits_equal_those_of_transformers_own_gguf_loader(
    quantisation: str, weights: dict[str, Array], tiny_model_folder: Path, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", weights, tiny_model_folder, quantisation)
    reference = read_by_transformers(path)
    with torch.no_grad():
        expected = reference(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(path, IDS), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("quantisation", "error"), [("F32", 0), ("F16", 2e-3), ("BF16", 1e-2), ("Q8_0", 0.02), ("Q4_0", 0.5)])
def test_weights_come_back_in_hugging_face_order(
    quantisation: str, error: float, weights: dict[str, Array], tiny_model_folder: Path, tmp_path: Path
) -> None:
    opened = GgufFile(write_gguf(tmp_path / "tiny.gguf", weights, tiny_model_folder, quantisation))
    assert set(opened.names()) == set(weights)
    for name, array in weights.items():
        assert opened.array(name).dtype == np.float32
        np.testing.assert_allclose(opened.array(name), array, atol=error, rtol=0)


def test_row_order_is_undone_exactly() -> None:
    rows = np.arange(6 * 8 * 3, dtype=np.float32).reshape(48, 3)
    assert not np.array_equal(permute(rows, 6), rows)
    np.testing.assert_array_equal(unpermute(permute(rows, 6), 6), rows)
    np.testing.assert_array_equal(unpermute(permute(rows[:, 0], 6), 6), rows[:, 0])


def test_a_missing_output_tensor_ties_the_head(weights: dict[str, Array], tiny_model_folder: Path, tmp_path: Path) -> None:
    tied = {name: array for name, array in weights.items() if name != "lm_head.weight"}
    path = write_gguf(tmp_path / "tied.gguf", tied, tiny_model_folder)
    same = {**tied, "lm_head.weight": weights["model.embed_tokens.weight"]}
    untied = write_gguf(tmp_path / "untied.gguf", same, tiny_model_folder)
    assert torch.equal(logits(path, IDS), logits(untied, IDS))


def test_frequency_factors_of_the_file_are_used(weights: dict[str, Array], tiny_model_folder: Path, tmp_path: Path) -> None:
    plain = logits(write_gguf(tmp_path / "plain.gguf", weights, tiny_model_folder), IDS)
    halves = {**weights, "rope_freqs.weight": np.full(HEAD_DIM // 2, 2.0, np.float32)}
    scaled = logits(write_gguf(tmp_path / "factors.gguf", halves, tiny_model_folder), IDS)
    linear = {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": 2.0}
    expected = logits(write_gguf(tmp_path / "linear.gguf", weights, tiny_model_folder, **linear), IDS)
    assert (scaled - plain).abs().max() > 0.1
    torch.testing.assert_close(scaled, expected, atol=1e-5, rtol=0)


def test_an_unsupported_quantisation_is_named(weights: dict[str, Array], tiny_model_folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", weights, tiny_model_folder, "Q5_0")
    with pytest.raises(ModelError, match="is Q5_0; supported are F32, F16, BF16, Q8_0"):
        GgufFile(path)


def test_tensors_of_other_models_are_named() -> None:
    assert hf_name("blk.11.ffn_up.weight") == "model.layers.11.mlp.up_proj.weight"
    assert hf_name("output.weight") == "lm_head.weight"
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q_norm\.weight"):
        hf_name("blk.0.attn_q_norm.weight")


@pytest.mark.parametrize("keep", [0, 3, 40, 2000, -40])
def test_a_cut_file_is_refused_in_one_line(keep: int, weights: dict[str, Array], tiny_model_folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", weights, tiny_model_folder)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="cannot be read as GGUF") as caught:
        load_tokenizer(ModelSource(path, "gguf", "cut"))
    assert "\n" not in str(caught.value)


def test_a_second_load_reads_the_cache_and_gives_the_same(
    weights: dict[str, Array], tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", weights, tiny_model_folder, "Q4_1")
    source = ModelSource(path, "gguf", "tiny")
    config, tokenizer = load_tokenizer(source)
    first = {dtype: logits(path, IDS, dtype) for dtype in ("float32", "bfloat16")}
    monkeypatch.setattr(conversion, "GgufFile", lambda path: pytest.fail("the file was opened again"))
    again_config, again = load_tokenizer(source)
    assert again_config == config
    assert again.special_tokens == tokenizer.special_tokens
    assert again.encode("the cat 12", False) == tokenizer.encode("the cat 12", False)
    for dtype, expected in first.items():
        assert torch.equal(logits(path, IDS, dtype), expected)
    assert not list(cache_folder().rglob("tmp-*"))


def test_an_unwritable_cache_costs_one_line_and_nothing_else(
    weights: dict[str, Array],
    tiny_model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", weights, tiny_model_folder)
    expected = logits(path, IDS)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    caplog.clear()
    assert torch.equal(logits(path, IDS), expected)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot be written" in caplog.text


def test_a_full_disk_leaves_no_half_file_and_the_model_still_loads(
    weights: dict[str, Array],
    tiny_model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fill_up(path: Path, *_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    path = write_gguf(tmp_path / "tiny.gguf", weights, tiny_model_folder)
    monkeypatch.setattr("batchrun.engine.weights.write_safetensors", fill_up)
    without = logits(path, IDS)
    assert "No space left on device" in caplog.text
    names = {found.name for found in cache_folder().rglob("*") if found.is_file()}
    assert names == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert torch.equal(logits(path, IDS), without)


def test_damaged_conversions_are_made_again(
    weights: dict[str, Array], tiny_model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", weights, tiny_model_folder)
    expected = logits(path, IDS)
    (cached,) = cache_folder().rglob("float32.safetensors")
    for name, message in ((cached.name, "the cached weights"), ("tokenizer.json", "the cached conversion")):
        damaged = cached.parent / name
        damaged.write_bytes(damaged.read_bytes()[:-100])
        caplog.clear()
        assert torch.equal(logits(path, IDS), expected)
        assert message in caplog.text
        caplog.clear()
        assert torch.equal(logits(path, IDS), expected)
        assert not caplog.records


def test_another_file_or_converter_gets_its_own_place(
    weights: dict[str, Array], tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ConvertedModel(write_gguf(tmp_path / "a.gguf", weights, tiny_model_folder))
    ConvertedModel(write_gguf(tmp_path / "b.gguf", weights, tiny_model_folder))
    assert len(list(cache_folder().iterdir())) == 1
    ConvertedModel(write_gguf(tmp_path / "c.gguf", weights, tiny_model_folder, context_length=64))
    assert len(list(cache_folder().iterdir())) == 2
    monkeypatch.setattr(conversion, "CONVERTER_VERSION", 999)
    ConvertedModel(tmp_path / "a.gguf")
    assert len(list(cache_folder().iterdir())) == 3


def test_processes_that_convert_at_once_all_succeed(weights: dict[str, Array], tiny_model_folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", weights, tiny_model_folder)
    code = (
        "import torch, sys; from pathlib import Path; from batchrun.engine.conversion import ConvertedModel\n"
        "sys.stdin.readline()\n"
        f"model = ConvertedModel(Path({str(path)!r})); print(len(model.weights(torch.float32).names()))"
    )
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    processes = [subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        output, errors = process.communicate(timeout=120)
        assert (output.strip(), errors) == (str(len(weights)), "")
    assert not list(cache_folder().rglob("tmp-*"))
