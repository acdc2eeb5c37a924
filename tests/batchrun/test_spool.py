"""Token ids on disk."""

import builtins
import errno

import numpy as np
import pytest

from batchrun.errors import Stopped
from batchrun.spool import TokenSpool


def test_rows_come_back_as_they_went_in_and_error_rows_are_empty(tmp_path):
    spool = TokenSpool(tmp_path)
    rows = [[5, 6, 7], [], [8], [], [2**31 - 1, 0]]
    for row in rows:
        spool.append(np.array(row, dtype=np.int32))
    tokens, begin, length = spool.close()
    assert (tokens.dtype, begin.dtype, length.dtype) == (np.int32, np.int64, np.int32)
    assert [tokens[b : b + n].tolist() for b, n in zip(begin, length, strict=True)] == rows
    assert isinstance(tokens, np.memmap)


@pytest.mark.parametrize("num_rows", [0, 3])
def test_a_spool_without_any_token_can_be_closed(tmp_path, num_rows):
    spool = TokenSpool(tmp_path)
    for _ in range(num_rows):
        spool.append(np.empty(0, dtype=np.int32))
    tokens, begin, length = spool.close()
    assert len(tokens) == 0
    assert begin.tolist() == length.tolist() == [0] * num_rows


def test_a_strided_row_is_stored_in_its_own_order(tmp_path):
    spool = TokenSpool(tmp_path)
    spool.append(np.arange(10, dtype=np.int32)[::3])
    assert spool.close().tokens.tolist() == [0, 3, 6, 9]


def test_what_an_earlier_process_left_is_overwritten(tmp_path):
    for ids in ([1, 2, 3], [9]):
        spool = TokenSpool(tmp_path)
        spool.append(np.array(ids, dtype=np.int32))
        tokens = spool.close().tokens
    assert tokens.tolist() == [9]


def test_a_full_disk_stops_with_the_path(tmp_path, monkeypatch):
    def full(*_args, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(builtins, "open", full)
    with pytest.raises(Stopped, match=r"tokens\.bin: no space left"):
        TokenSpool(tmp_path)
