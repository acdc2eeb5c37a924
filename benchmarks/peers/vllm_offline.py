"""vLLM's offline engine on the CPU as a worker process; runs in vLLM's own environment, so it imports nothing of ours.

Load once, then for every line on stdin ("given" or "sorted") generate for all the requests with an empty prefix cache and
print one line `RESULT {json}`. End of input ends the worker. Not called `vllm.py`: a script's own folder comes first on
the import path, and that name would hide the library.

The environment is the caller's business (`compare_vllm.py` sets it): VLLM_CPU_OMP_THREADS_BIND names all cores, since vLLM
leaves one of them to its server otherwise; LD_PRELOAD names tcmalloc and Intel's OpenMP, as vLLM's guide for CPUs advises.
"""

import argparse
import json
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--requests", type=Path, required=True, help="JSON list of {ids, max_tokens, n}")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-model-len", type=int, default=8192)
    args = parser.parse_args()
    requests = json.loads(args.requests.read_text())

    began = time.perf_counter()
    import vllm

    engine = vllm.LLM(args.model, dtype="bfloat16", enable_prefix_caching=True, max_model_len=args.max_model_len, seed=0)

    def pair(request: dict) -> tuple[dict, vllm.SamplingParams]:
        # No seed per request: with one, vLLM 0.32 stops the whole engine on the CPU.
        sampling = vllm.SamplingParams(
            temperature=args.temperature, max_tokens=request["max_tokens"], n=request["n"], ignore_eos=True, detokenize=True
        )
        return {"prompt_token_ids": request["ids"]}, sampling

    def generate(pairs: list[tuple[dict, vllm.SamplingParams]]) -> list:
        prompts, sampling = zip(*pairs, strict=True)
        return engine.generate(list(prompts), list(sampling), use_tqdm=False)

    pairs = {"given": [pair(request) for request in requests]}
    pairs["sorted"] = [pair(request) for request in sorted(requests, key=lambda request: request["ids"])]
    generate(pairs["given"][:1])  # whatever is still compiled or allocated at the first request
    print("READY " + json.dumps({"load_s": time.perf_counter() - began, "version": vllm.__version__}), flush=True)
    for line in sys.stdin:
        order = line.strip()
        if not engine.reset_prefix_cache():
            sys.exit("vLLM did not empty its prefix cache, so its figures would be wrong")
        started = time.perf_counter()
        outputs = generate(pairs[order])
        wall_s = time.perf_counter() - started
        result = {
            "wall_s": wall_s,
            "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
            "output_tokens": sum(len(sample.token_ids) for output in outputs for sample in output.outputs),
            "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        }
        print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
