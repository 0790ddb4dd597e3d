"""GSM8K by the cookbook's benchmark runner. `python evaluate.py DIRECTORY`."""

import asyncio
import sys

import tinker
from tinker_cookbook import renderers
from tinker_cookbook.eval.benchmarks import BenchmarkConfig, run_benchmark
from tinker_cookbook.tokenizer_utils import get_tokenizer

MODEL = "Qwen/Qwen3-8B"


def main(directory: str) -> None:
    sampler = tinker.ServiceClient().create_sampling_client(base_model=MODEL)
    if hasattr(sampler, "result"):  # a future, from SDK 0.38 on
        sampler = sampler.result()
    renderer = renderers.get_renderer("qwen3", get_tokenizer(MODEL))
    config = BenchmarkConfig(save_dir=directory, max_tokens=32)
    result = asyncio.run(run_benchmark("gsm8k", sampler, renderer, config))
    print(f"scored {result.num_examples} examples, {result.num_errors} errors")


if __name__ == "__main__":
    main(sys.argv[1])
