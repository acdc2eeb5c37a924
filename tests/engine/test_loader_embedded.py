"""The embedded SmolLM2-135M-Instruct, from its GGUF file: exact ids, the right end, the right weights."""

from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch

from batchrun.engine.gguf_file import GgufFile
from batchrun.engine.loader import LoadedModel, load_model, load_tokenizer, resolve_model
from batchrun.kernels import ops

CHAT_IDS = (
    "1 9690 198 2683 359 253 5356 5646 11173 3365 3511 308 34519 28 7018 411 407 19712 8182 2 198 "
    "1 4093 198 6004 2 198 1 520 9531 198"
)


@pytest.fixture(scope="module")
def loaded(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model in bfloat16, converted into a cache of this module's own; one thread, so that busy machines do not spin."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield load_model(resolve_model(None), "cpu", "bfloat16", 1)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("List:\n\n1. cat", [6106, 42, 1116, 33, 30, 2644]),
        ("Total:  42", [17647, 42, 256, 36, 34]),
        ("col\t\t7", [2283, 1656, 39]),
        ("  2024", [256, 34, 32, 34, 36]),
        ("naïve", [3546, 46494]),
        ("🙂", [10813, 38887]),
        ("", []),
    ],
)
def test_ids_follow_the_rule_that_every_digit_stands_alone(loaded: LoadedModel, text: str, ids: list[int]) -> None:
    assert loaded.tokenizer.encode(text, parse_special=False) == ids
    assert loaded.tokenizer.encode_raw([text]) == [ids]
    assert loaded.tokenizer.decode(ids) == text


def test_the_chat_template_of_the_file_gives_31_ids(loaded: LoadedModel) -> None:
    assert loaded.tokenizer.chat_template is not None
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(loaded.tokenizer.chat_template)
    text = template.render(messages=[{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert loaded.tokenizer.encode(text, parse_special=True) == [int(index) for index in CHAT_IDS.split()]


def test_the_end_is_id_2_and_special_strings_can_be_plain_text(loaded: LoadedModel) -> None:
    assert loaded.config.eos_ids == (2,)
    assert loaded.tokenizer.eos_token == "<|im_end|>"
    assert loaded.tokenizer.encode("<|im_end|>", parse_special=True) == [2]
    plain = loaded.tokenizer.encode("<|im_end|><|im_start|>", parse_special=False)
    assert min(plain) > max(loaded.tokenizer.special_tokens.values())
    assert loaded.tokenizer.decode(plain) == "<|im_end|><|im_start|>"


def test_shape_and_size(loaded: LoadedModel) -> None:
    assert (loaded.config.num_heads, loaded.config.num_kv_heads, loaded.config.head_dim) == (9, 3, 64)
    assert (loaded.config.max_context, loaded.config.rope_theta) == (8192, 100_000.0)
    assert loaded.config.tie_embeddings
    assert loaded.config.kv_bytes_per_token(loaded.dtype) == 23_040


def prefill(model: LoadedModel, ids: list[int]) -> torch.Tensor:
    """float32 [vocab]: the logits after the last id."""
    config = model.config
    shape = ops.KVConfig(config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, model.dtype)
    kv = ops.allocate_kv(shape, -(-len(ids) // ops.page_size("cpu")))
    places = torch.arange(len(ids))
    plan = ops.build_plan(kv, [ops.AttentionItem(0, len(ids), [(0, len(ids))], len(ids), True)], len(ids))
    return model.decoder.forward(torch.tensor(ids), places, places, kv, plan, torch.tensor([len(ids) - 1]))[0]


def test_the_likeliest_next_tokens_make_sense(loaded: LoadedModel) -> None:
    for text, following in (("The capital of France is", " Paris"), ("one, two, three, four,", " five")):
        logits = prefill(loaded, loaded.tokenizer.encode(text, parse_special=False))
        assert loaded.tokenizer.decode([int(logits.argmax())]) == following


def test_a_second_load_is_served_from_the_cache(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: GgufFile, path: Path) -> None:
        raise AssertionError("the GGUF file was opened again")

    monkeypatch.setattr(GgufFile, "__init__", refuse)
    assert load_tokenizer(resolve_model(None))[0] == loaded.config
    again = load_model(resolve_model(None), "cpu", "bfloat16")
    ids = loaded.tokenizer.encode("hello", parse_special=False)
    assert torch.equal(prefill(again, ids), prefill(loaded, ids))


@pytest.mark.slow
def test_weights_and_logits_equal_those_of_transformers_own_gguf_loader(embedded_model: Path, loaded: LoadedModel) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = load_gguf_checkpoint(str(embedded_model))["config"]
    reference = LlamaForCausalLM(LlamaConfig(**config)).eval()
    tensors = load_gguf_checkpoint(str(embedded_model), return_tensors=True, model_to_load=reference)["tensors"]
    reference.load_state_dict(tensors, strict=False)
    reference.tie_weights()
    model = load_model(resolve_model(None), "cpu", "float32")
    ids = loaded.tokenizer.encode("The capital of France is", parse_special=False)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0, -1]
    assert int(prefill(loaded, ids).argmax()) == int(expected.argmax())
    torch.testing.assert_close(prefill(model, ids), expected, atol=1e-3, rtol=0)
    opened, hidden = GgufFile(embedded_model), torch.randn(16, 576, generator=torch.Generator().manual_seed(0))
    attention = reference.model.layers[0].self_attn
    for name, heads, theirs in (("q_proj", 9, attention.q_proj), ("k_proj", 3, attention.k_proj)):
        ours = (hidden @ opened.get(f"model.layers.0.self_attn.{name}.weight").T).view(16, heads, 64)
        with torch.no_grad():
            other = theirs(hidden).view(16, heads, 64)
        assert torch.nn.functional.cosine_similarity(ours, other, dim=-1).min() > 0.999
