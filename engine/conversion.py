"""A GGUF file's conversion, kept: opening and de-quantising one takes seconds, reading the result a fraction of one.

In the user's cache folder, `batchrun/models/HASH-vVERSION/` holds config.json, tokenizer.json and tokenizer_config.json,
and one `DTYPE.safetensors` for each compute type asked for so far (float32 values rounded once, as loading would).
Everything is written under a temporary name and renamed, so that processes may race and be killed. Never holding a
whole model, a conversion needs little memory.
"""

import json
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from batchrun.engine.config import ModelConfig
from batchrun.engine.content_hash import hash_files
from batchrun.engine.errors import ModelError
from batchrun.engine.gguf_file import GgufFile
from batchrun.engine.gguf_tokenizer import tokenizer_config, tokenizer_json
from batchrun.engine.tokenizer import Tokenizer, read_json

if TYPE_CHECKING:
    import torch

    from batchrun.engine.weights import TensorSource

CONVERTER_VERSION = 1
"""Part of the key: raise it when a conversion's result changes."""

_STALE_SECONDS = 3600
_log = logging.getLogger(__name__)


class ConvertedModel:
    """A GGUF file as config, tokenizer and weights, through the cache where that can be written."""

    def __init__(self, path: Path) -> None:
        """Hashes the file; converts config and tokenizer when the cache lacks them.

        Raises:
            ModelError: the file cannot be read or is not supported.
        """
        self.path = path
        try:
            self.content_hash = hash_files([path])
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        self._opened: GgufFile | None = None
        self._folder: Path | None = cache_folder() / f"{self.content_hash}-v{CONVERTER_VERSION}"
        if not self._read_tokenizer(self._folder):
            self._folder = self._convert_tokenizer(self._folder)

    def weights(self, dtype: "torch.dtype") -> "TensorSource":
        """The weights rounded to dtype, from the cache; from the file itself in float32 when there is no cache."""
        from batchrun.engine.weights import SafetensorsSource

        if self._folder is None:
            return self._open()
        path = self._folder / f"{str(dtype).removeprefix('torch.')}.safetensors"
        if path.is_file():
            try:
                return SafetensorsSource([path])
            except ModelError:
                _log.warning("the cached weights %s are damaged: converting again", path)
        if not self._write_weights(path, dtype):
            return self._open()
        return SafetensorsSource([path])

    def _open(self) -> GgufFile:
        if self._opened is None:
            self._opened = GgufFile(self.path)
        return self._opened

    def _read_tokenizer(self, folder: Path) -> bool:
        """Set config and tokenizer from the cache, if they are there."""
        if not (folder / "config.json").is_file():
            return False
        try:
            self.config = ModelConfig.from_hf(read_json(folder / "config.json"))
            self.tokenizer = Tokenizer.from_folder(folder)
        except ModelError:
            _log.warning("the cached conversion %s is damaged: converting again", folder)
            shutil.rmtree(folder, ignore_errors=True)
            return False
        return True

    def _convert_tokenizer(self, folder: Path) -> Path | None:
        """Set config and tokenizer from the file; the folder that now holds them, or None when it cannot be written."""
        opened = self._open()
        self.config = opened.config
        content, config = tokenizer_json(opened.metadata), tokenizer_config(opened.metadata)
        self.tokenizer = Tokenizer(content, config, config.get("chat_template"))
        temporary = None
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(folder.parent)
            temporary = Path(tempfile.mkdtemp(prefix="tmp-", dir=folder.parent))
            for name, values in (("tokenizer_config.json", config), ("config.json", self.config.to_hf())):
                (temporary / name).write_text(json.dumps(values), encoding="utf-8")
            (temporary / "tokenizer.json").write_text(content, encoding="utf-8")
            temporary.rename(folder)
        except OSError as error:
            if (folder / "config.json").is_file():  # another process was faster
                return folder
            _warn_unwritable(folder.parent, error)
            return None
        finally:  # gone already when all went well
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
        return folder

    def _write_weights(self, path: Path, dtype: "torch.dtype") -> bool:
        from batchrun.engine.weights import write_safetensors

        temporary = None
        try:
            _remove_stale(path.parent)
            handle, name = tempfile.mkstemp(prefix="tmp-", dir=path.parent)
            os.close(handle)
            temporary = Path(name)
            write_safetensors(temporary, self._open(), dtype)
            temporary.replace(path)
        except OSError as error:
            _warn_unwritable(path.parent, error)
            return False
        finally:  # gone already when all went well
            if temporary is not None:
                temporary.unlink(missing_ok=True)
        return True


def cache_folder() -> Path:
    """Where conversions are kept: `batchrun/models` in the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if os.path.isabs(configured) else Path("~/.cache").expanduser()
    return base / "batchrun" / "models"


def _warn_unwritable(folder: Path, error: OSError) -> None:
    _log.warning("the cache %s cannot be written (%s): the model is converted anew in each run", folder, error.strerror)


def _remove_stale(folder: Path) -> None:
    """Remove what conversions that were killed left behind."""
    for path in folder.glob("tmp-*"):
        try:
            stale = time.time() - path.stat().st_mtime > _STALE_SECONDS
        except FileNotFoundError:  # another process has just renamed it
            continue
        if stale and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif stale:
            path.unlink(missing_ok=True)
