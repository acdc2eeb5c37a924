"""What a model's files contain, as one short string."""

from collections.abc import Iterable
from pathlib import Path

import xxhash

_BLOCK_BYTES = 1 << 22


def hash_files(paths: Iterable[Path]) -> str:
    """xxh3-128 (hex) of the files' sizes and bytes in the order given; names and dates do not matter.

    Raises:
        OSError: a file cannot be read.
    """
    digest = xxhash.xxh3_128()
    for path in paths:
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()
