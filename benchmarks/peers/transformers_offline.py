"""transformers' `generate` on the CPU as a worker (see worker.py): static batches of 16 prompts (fewer where they have many
samples), padded on the left, bfloat16.

The caller gives requests by length, so that little is padded. Nothing is shared between rows. A batch runs to the longest
`max_tokens` in it, and what a row has beyond its own is cut off.
"""

import argparse
import time

import worker

BATCH_ROWS = 16
BATCH_SAMPLES = 64
"""Samples of a batch: `generate` computes a prompt once for each of its samples, and all of them at once."""


def batches(requests: list[dict]) -> list[list[dict]]:
    """At most BATCH_ROWS requests and BATCH_SAMPLES samples each (but one request at least), in order, of equal `n`."""
    groups: list[list[dict]] = []
    for request in requests:
        most = max(1, min(BATCH_ROWS, BATCH_SAMPLES // request["n"]))
        if not groups or len(groups[-1]) == most or groups[-1][0]["n"] != request["n"]:
            groups.append([])
        groups[-1].append(request)
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--threads", type=int, required=True)
    args = parser.parse_args()

    began = time.perf_counter()
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    pad_id = model.generation_config.pad_token_id or 0
    model.generation_config.eos_token_id = None  # fixed output length

    def generate(batch: list[dict], temperature: float) -> list[list[int]]:
        width = max(len(request["ids"]) for request in batch)
        ids = torch.full((len(batch), width), pad_id)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request["ids"]) :] = torch.tensor(request["ids"])
            mask[row, width - len(request["ids"]) :] = 1
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        sampling = drawn if temperature > 0 else {"do_sample": False}
        samples, longest = batch[0]["n"], max(request["max_tokens"] for request in batch)
        with torch.inference_mode():
            found = model.generate(
                ids, attention_mask=mask, max_new_tokens=longest, num_return_sequences=samples, pad_token_id=pad_id, **sampling
            )
        lengths = [request["max_tokens"] for request in batch for _ in range(samples)]
        return [row[:length] for row, length in zip(found[:, width:].tolist(), lengths, strict=True)]

    def run(requests: list[dict], temperature: float) -> list[list[int]]:
        outputs = [ids for batch in batches(requests) for ids in generate(batch, temperature)]
        tokenizer.batch_decode(outputs)
        return outputs

    worker.say("READY", load_s=time.perf_counter() - began, version=transformers.__version__)
    for requests, temperature in worker.jobs():
        outputs, wall_s = worker.timed(lambda requests=requests, temperature=temperature: run(requests, temperature))
        worker.say(
            "RESULT",
            wall_s=wall_s,
            prompt_tokens=sum(len(request["ids"]) for request in requests),
            output_tokens=sum(map(len, outputs)),
            cached_tokens=0,
        )


if __name__ == "__main__":
    main()
