"""What the application may know of the kernels on a device."""


def page_size(device: str) -> int:
    """Tokens per page of the KV pool; imports torch.

    Raises:
        ValueError: a device that has no kernels.
    """
    from batchrun.kernels import ops

    return ops.page_size(device)


def attention_status() -> str:
    """One line: where the compiled attention of bfloat16 lies, or why torch computes it. Builds it if need be; imports torch."""
    from batchrun.kernels import ops

    return ops.native_status()


def missing_for_int8(head_dim: int, here: bool = True) -> str | None:
    """What keeps keys and values of a bfloat16 model from being in int8, `needs ...`; None if nothing does. Imports torch.

    Args:
        here: on this machine, for which the compiled kernel is built if need be; else the head size alone is looked at.
    """
    from batchrun.kernels import ops

    return ops.missing_for_int8(head_dim, here)


def missing_kernel(dtype: str) -> str | None:
    """Why attention in this dtype goes without the compiled kernel that it could have; None when nothing is missing."""
    status = attention_status() if dtype == "bfloat16" else "compiled"
    return None if status.startswith("compiled") else status
