"""The unmodified tinker SDK with many samples in flight, for `benchmarks/api.py`.

    python benchmarks/api_load.py URL MODEL IN_FLIGHT MAX_TOKENS

Samples over and over until its stdin closes, then prints how many were done. One client keeps at
most 2,000 requests in flight, so no more than that are offered.
"""

from __future__ import annotations

import asyncio
import sys
import warnings

import tinker
from tinker import types

warnings.simplefilter("ignore")  # of calls that only newer SDKs call deprecated


async def load(url: str, model: str, in_flight: int, max_tokens: int) -> int:
    service = tinker.ServiceClient(base_url=url, api_key="tml-load")
    sampler = await service.create_sampling_client_async(base_model=model)
    prompt = types.ModelInput.from_ints(list(range(2, 18)))
    params = types.SamplingParams(max_tokens=max_tokens, stop=[])
    done = 0

    async def over_and_over() -> None:
        nonlocal done
        while True:
            await sampler.sample_async(prompt, num_samples=1, sampling_params=params)
            done += 1

    loops = [asyncio.get_running_loop().create_task(over_and_over()) for _ in range(in_flight)]
    print("loading", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for each in loops:
        each.cancel()
    return done


if __name__ == "__main__":
    address, name, samples, tokens = sys.argv[1:]
    print(asyncio.run(load(address, name, int(samples), int(tokens))), flush=True)
    sys.stdout.flush()
    # The SDK's own threads would finish their telemetry first.
    import os

    os._exit(0)
