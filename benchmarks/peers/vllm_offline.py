"""vLLM's offline engine on the CPU as a worker (see worker.py); runs in vLLM's own environment.

Loads once; every job is one call of `LLM.generate` with an empty prefix cache. Not called `vllm.py`: a script's own folder
comes first on the import path, and that name would hide the library.

The environment is the caller's business (`engines.py` sets it): VLLM_CPU_OMP_THREADS_BIND names all cores, since vLLM
leaves one of them to its server otherwise; LD_PRELOAD names tcmalloc and Intel's OpenMP, as vLLM's guide for CPUs advises.
"""

import argparse
import sys
import time

import worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--max-model-len", type=int, default=8192)
    args = parser.parse_args()

    began = time.perf_counter()
    import vllm

    engine = vllm.LLM(args.model, dtype="bfloat16", enable_prefix_caching=True, max_model_len=args.max_model_len, seed=0)

    def pair(request: dict, temperature: float) -> tuple[dict, vllm.SamplingParams]:
        # No seed per request: with one, vLLM 0.32 stops the whole engine on the CPU.
        sampling = vllm.SamplingParams(
            temperature=temperature, max_tokens=request["max_tokens"], n=request["n"], ignore_eos=True, detokenize=True
        )
        return {"prompt_token_ids": request["ids"]}, sampling

    def generate(pairs: list[tuple[dict, vllm.SamplingParams]]) -> list:
        prompts, sampling = zip(*pairs, strict=True)
        return engine.generate(list(prompts), list(sampling), use_tqdm=False)

    # Whatever is still compiled or allocated at the first requests, greedy and sampled.
    for temperature in (0.0, 0.8):
        generate([pair({"ids": list(range(10, 200)), "max_tokens": 4, "n": 2 if temperature else 1}, temperature)])
    worker.say("READY", load_s=time.perf_counter() - began, version=vllm.__version__)
    for requests, temperature in worker.jobs():
        pairs = [pair(request, temperature) for request in requests]
        if not engine.reset_prefix_cache():
            sys.exit("vLLM did not empty its prefix cache, so its figures would be wrong")
        outputs, wall_s = worker.timed(lambda pairs=pairs: generate(pairs))
        worker.say(
            "RESULT",
            wall_s=wall_s,
            prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
            output_tokens=sum(len(sample.token_ids) for output in outputs for sample in output.outputs),
            cached_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
        )


if __name__ == "__main__":
    main()
