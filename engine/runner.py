"""All that touches the device: turns a step's numbers into tensors and runs the model."""

import torch

from batchrun.engine.loader import LoadedModel
from batchrun.engine.step import StepPlan
from batchrun.kernels import ops


class Runner:
    """Owns the KV pool's tensors and the attention plan of the current membership.

    Args:
        model: weights on their device.
        num_pages: pages of the pool, each `ops.page_size(device)` tokens.
        kv_dtype: of the pool, `auto` or `int8`.
    """

    def __init__(self, model: LoadedModel, num_pages: int, kv_dtype: str = "auto") -> None:
        config = model.config
        self._decoder = model.decoder
        self._device = model.device
        self._kv = ops.allocate_kv(
            ops.KVConfig(
                num_layers=config.num_layers,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=model.dtype,
                device=model.device,
                kv_dtype=torch.int8 if kv_dtype == "int8" else None,
            ),
            num_pages,
        )
        self._attention: ops.AttentionPlan | None = None

    @torch.inference_mode()
    def execute(self, step: StepPlan) -> torch.Tensor:
        """Write the step's keys and values; return logits [len(step.logit_rows), vocab] in the model's dtype, on the CPU."""
        if step.segments is None:
            assert self._attention is not None, "the first step has segments"
            ops.advance_plan(self._attention)
        else:
            items = [ops.AttentionItem(*segment) for segment in step.segments]
            self._attention = ops.build_plan(self._kv, items, len(step.token_ids))
        logits = self._decoder.forward(
            torch.from_numpy(step.token_ids).to(self._device),
            torch.from_numpy(step.positions).to(self._device),
            torch.from_numpy(step.slots).to(self._device),
            self._kv,
            self._attention,
            torch.from_numpy(step.logit_rows).to(self._device),
        )
        return logits.cpu()
