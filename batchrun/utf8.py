"""Strings whose bytes are not UTF-8: Parquet files hold them, Arrow passes them on unchecked, readers choke on them."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa


class Repaired(NamedTuple):
    """A column whose strings are all UTF-8."""

    column: pa.Array
    """Of the same type and length; the very same array when nothing was wrong."""
    bad: npt.NDArray[np.bool_]
    """[rows] where bytes became U+FFFD."""


def repair_utf8(column: pa.Array) -> Repaired:
    """Replace bytes that are not UTF-8 by U+FFFD, at any depth."""
    bad = np.zeros(len(column), dtype=bool)
    if _is_valid(column):
        return Repaired(column, bad)
    # The rest is slow and only for batches with a fault in them.
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
    pieces = []
    for i in range(len(column)):
        piece = column.slice(i, 1)
        if pa.types.is_nested(piece.type):
            # A slice of a nested array still holds all children; taking copies one row's.
            piece = column.take(pa.array([i]))
        if not _is_valid(piece):
            bad[i] = True
            piece = pa.array([_decoded(column[i])], column.type)
        pieces.append(piece)
    repaired = pa.concat_arrays(pieces)
    if pa.types.is_dictionary(kind):
        repaired = repaired.dictionary_encode().cast(kind)
    return Repaired(repaired, bad)


def _is_valid(column: pa.Array) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _decoded(cell: pa.Scalar) -> Any:
    """The cell as Python values that make an array again: texts decoded with U+FFFD, everything else as the scalar it is."""
    decoded: Any = cell
    if not cell.is_valid:
        decoded = None
    elif isinstance(cell, (pa.StringScalar, pa.LargeStringScalar, pa.StringViewScalar)):
        decoded = cell.as_buffer().to_pybytes().decode("utf-8", "replace")
    elif isinstance(cell, pa.DictionaryScalar):
        decoded = _decoded(cell.value)
    elif isinstance(cell, pa.StructScalar):
        decoded = {name: _decoded(item) for name, item in cell.items()}
    elif isinstance(cell, pa.MapScalar):
        decoded = [(_decoded(pair[0]), _decoded(pair[1])) for pair in cell.values]
    elif isinstance(cell, pa.ListScalar):
        decoded = [_decoded(item) for item in cell.values]
    return decoded
