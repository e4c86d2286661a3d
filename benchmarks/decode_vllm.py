"""vLLM on a CPU as a worker of decode_cpu.py, which runs it with `--peers`.

Reads a folder of bfloat16 safetensors. Its scheduler runs in this process, and it makes no text of its tokens, so both
are cheaper than in a server.
"""

from __future__ import annotations

import argparse
import os

from decode_protocol import FirstTokens, Run, Times, answer_batches


def load(folder: str, rows: int, context: int, cache_gib: int) -> Run:
    """The model on as many threads as there are cores."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams  # reads the environment

    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=context, max_num_seqs=rows, dtype="bfloat16")
    engine = llm.llm_engine
    batches = 0

    def run(prompts: list[list[int]], output: int) -> Times:
        nonlocal batches
        batches += 1
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        clock, tokens = FirstTokens(len(prompts)), 0
        for number, prompt in enumerate(prompts):
            engine.add_request(f"{batches}-{number}", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for each in engine.step():
                clock.saw(int(each.request_id.split("-")[1]))
                tokens += len(each.outputs[0].token_ids) if each.finished else 0
        times = clock.end()
        assert tokens == len(prompts) * output
        return times

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--rows", type=int, default=32, help="concurrent requests")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--cache-gib", type=int, default=1)
    arguments = parser.parse_args()
    answer_batches(lambda: load(arguments.folder, arguments.rows, arguments.context, arguments.cache_gib))


if __name__ == "__main__":
    main()
