"""Where a model's tensors come from: safetensors files, read one tensor at a time."""

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from batchrun.engine.errors import ModelError
from batchrun.engine.tokenizer import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class TensorSource(Protocol):
    """Tensors by Hugging Face's names for them."""

    def names(self) -> Collection[str]:
        """All names, without reading a tensor."""
        ...

    def get(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in the file's own floating-point type; maybe a view of a memory map.

        Raises:
            ModelError: there is no such tensor, or the file is cut.
        """
        ...


class SafetensorsSource:
    """The tensors of one or more safetensors files, memory-mapped; nothing stays mapped once its tensors are gone."""

    def __init__(self, files: Collection[Path]) -> None:
        """Raises:
        ModelError: a file is missing, cut or not safetensors.
        """
        self._handles: list[Any] = []
        self._where: dict[str, int] = {}
        for number, path in enumerate(files):
            try:
                handle: Any = safe_open(path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} cannot be read as safetensors ({error}): is it cut? Fetch it again") from error
            self._handles.append(handle)
            self._where.update(dict.fromkeys(handle.keys(), number))

    def names(self) -> Collection[str]:
        return self._where.keys()

    def get(self, name: str) -> torch.Tensor:
        if name not in self._where:
            raise ModelError(f"the model's weights have no tensor {name!r}: they do not fit its config.json")
        tensor: torch.Tensor = self._handles[self._where[name]].get_tensor(name)
        return tensor


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder, those of the index where there is one, in order of name.

    Raises:
        ModelError: there are none, or one that the index names is missing.
    """
    if (folder / INDEX_NAME).is_file():
        shards = read_json(folder / INDEX_NAME).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelError(f"{folder / INDEX_NAME} has no weight_map")
        files = [folder / name for name in sorted(set(shards.values()))]
        if missing := [path.name for path in files if not path.is_file()]:
            raise ModelError(f"{folder} lacks {', '.join(missing)}, which {INDEX_NAME} names: fetch the model again")
        return files
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    others = sorted(path.name for path in folder.glob("*.bin")) or sorted(path.name for path in folder.glob("*.safetensors"))
    found = f"; it has {', '.join(others[:3])}" if others else ""
    raise ModelError(f"{folder} has no {SINGLE_NAME} or {INDEX_NAME}{found}: weights are read from those")


def write_safetensors(path: Path, source: TensorSource, dtype: torch.dtype) -> None:
    """Write all of a source's tensors to one file, one at a time, so that the whole model never lies in memory.

    The format: the header's length as 8 bytes, a JSON header (type, shape and place of each tensor), the bytes.

    Raises:
        OSError: the file cannot be written.
    """
    names = sorted(source.names())
    kind = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    with path.open("wb") as file:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        # Shapes are known only as tensors come: leave room for the header, then go back and fill it in.
        room = 256 * (len(names) + 1)
        file.write(room.to_bytes(8, "little") + b" " * room)
        place = 0
        for name in names:
            tensor = source.get(name).to(dtype).contiguous()
            size = tensor.numel() * tensor.element_size()
            file.write(tensor.view(torch.uint8).numpy().data)
            header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [place, place + size]}
            place += size
        encoded = json.dumps(header, separators=(",", ":")).encode()
        assert len(encoded) <= room, (len(encoded), room)
        file.seek(8)
        file.write(encoded)
        file.flush()
        os.fsync(file.fileno())  # a machine that stops now must not leave a file of the right size full of zeros
