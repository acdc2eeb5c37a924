"""What the application may know of the kernels on a device."""


def page_size(device: str) -> int:
    """Tokens per page of the KV pool; imports torch.

    Raises:
        ValueError: a device that has no kernels.
    """
    from batchrun.kernels import ops

    return ops.page_size(device)
