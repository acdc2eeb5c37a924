"""OpenVINO GenAI's continuous batching on the CPU as a worker (see worker.py); runs in OpenVINO's own environment.

bfloat16 compute, prefix caching, prompts split over steps. The model is a folder written by `optimum-cli export openvino`.
One job a process: the pipeline has no call that empties its prefix cache, so the caller starts a new one for every run.
"""

import argparse
import time

import worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder in OpenVINO's format")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kv-gib", type=int, default=8, help="KV cache (default 8)")
    args = parser.parse_args()

    began = time.perf_counter()
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = args.kv_gib
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 2048, 256
    scheduler.enable_prefix_caching = scheduler.dynamic_split_fuse = True
    # Left alone it takes one thread for each physical core, which on a virtual machine is half of them.
    properties = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": args.threads, "ENABLE_HYPER_THREADING": True}
    pipeline = genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)

    def settings(request: dict, temperature: float) -> genai.GenerationConfig:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.num_return_sequences, config.ignore_eos = request["max_tokens"], request["n"], True
        if temperature > 0:
            config.do_sample, config.temperature = True, temperature
        return config

    worker.say("READY", load_s=time.perf_counter() - began, version=genai.__version__)
    for requests, temperature in worker.jobs():
        prompts = [openvino.Tensor(np.array([request["ids"]], dtype=np.int64)) for request in requests]
        configs = [settings(request, temperature) for request in requests]
        outputs, wall_s = worker.timed(lambda prompts=prompts, configs=configs: pipeline.generate(prompts, configs))
        worker.say(
            "RESULT",
            wall_s=wall_s,
            prompt_tokens=sum(prompt.shape[1] for prompt in prompts),
            output_tokens=sum(len(ids) for output in outputs for ids in output.m_generation_ids),
            cached_tokens=None,
        )


if __name__ == "__main__":
    main()
