"""What the operations are told: the pool's shape and a step's attention items. Plain data, no device."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAGE_SIZE = 16
"""Tokens per page: small enough that short nodes waste little, large enough that page lists stay short."""
SCALE_BYTES = 4
"""A float32: what goes with a token's key, or value, of one head in int8."""


@dataclass(frozen=True)
class KVConfig:
    """Shape of a model's keys and values.

    Raises:
        ValueError: a size below 1, query heads that are no multiple of the key-value heads, or a dtype that is unknown or unfit.
    """

    num_layers: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: str = "cpu"
    kv_dtype: torch.dtype | None = None
    """Of keys and values in the pool: None is `dtype`; torch.int8, with a scale per token and head, goes with bfloat16 only."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads is {self.num_heads}: it must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype}: it must be one of {', '.join(map(str, DTYPES))}")
        if self.kv_dtype not in (None, self.dtype, torch.int8):
            raise ValueError(f"kv_dtype is {self.kv_dtype}: it must be {self.dtype}, as dtype is, or torch.int8")
        if self.is_int8 and self.dtype != torch.bfloat16:
            raise ValueError(f"kv_dtype is torch.int8 and dtype {self.dtype}: it goes with torch.bfloat16 only")

    @property
    def group(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_int8(self) -> bool:
        """Whether keys and values are."""
        return self.kv_dtype == torch.int8

    @property
    def head_bytes(self) -> int:
        """Key and value of one token in one head of one layer."""
        return 2 * (self.head_dim + SCALE_BYTES if self.is_int8 else self.head_dim * self.dtype.itemsize)

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return self.num_layers * self.num_kv_heads * self.head_bytes


class AttentionItem(NamedTuple):
    """An interval of the step's tokens that attends to one list of keys.

        tokens        [query_start, query_start + query_count)
        keys          the first num_keys slots of the runs, in order; further slots are reserved for later keys
        causal        the last query_count keys are the queries' own: query i sees keys [0, num_keys - query_count + i]
        not causal    every query sees all num_keys keys

    num_keys 0 is allowed: the item is absent.
    """

    query_start: int
    query_count: int
    runs: list[tuple[int, int]]
    """(first slot, number of slots), in key order; slot = page * page_size + offset."""
    num_keys: int
    causal: bool


def check_items(items: list[AttentionItem], num_tokens: int, num_slots: int) -> None:
    """Raise ValueError for items that no plan can be built of, naming the item by its position in the list."""
    covered = bytearray(num_tokens)
    for i, item in enumerate(items):
        start, end = item.query_start, item.query_start + item.query_count
        if not 0 <= start < end <= num_tokens:
            raise ValueError(f"item {i} has queries [{start}, {end}): they must lie in the step's {num_tokens} tokens")
        if any(first < 0 or count < 0 or first + count > num_slots for first, count in item.runs):
            raise ValueError(f"item {i} has runs {item.runs}: they must lie in the pool's {num_slots} slots")
        reserved = sum(count for _, count in item.runs)
        if not 0 <= item.num_keys <= reserved:
            raise ValueError(f"item {i} has {item.num_keys} keys: its runs hold {reserved} slots")
        if item.causal and 0 < item.num_keys < item.query_count:
            raise ValueError(f"item {i} is causal with {item.num_keys} keys for {item.query_count} queries: each needs its own")
        covered[start:end] = b"\1" * (end - start)
    if 0 in covered:
        raise ValueError(f"token {covered.index(0)} is in no attention item")


class Draws(NamedTuple):
    """Tokens to draw from rows of logits, one element of each tensor per draw."""

    which: torch.Tensor
    """int64 [N], rows of the logits."""
    place: torch.Tensor
    """int64 [N], where their largest logits lie (`ops.best`), all of them finite."""
    temperature: torch.Tensor
    """float32 [N], above 0."""
    min_p: torch.Tensor
    """float32 [N]: tokens with less than this share of the most likely one's probability are left out."""
    uniform: torch.Tensor
    """float64 [N], in [0, 1)."""
