"""A training loop with the unmodified SDK, which knows nothing of crashes.

    python loop.py BASE_URL MODEL STEPS OUT JOBS

Each step makes an ephemeral sampler, samples from it, trains on what was sampled (both requests of
a step are sent before either is awaited) and now and then saves. What came of it all is written
to OUT, to be compared with an undisturbed run; JOBS of them run side by side, all alike.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tinker
from tinker import types

PROMPT = [3, 1, 4, 1, 5]
SAVE_EVERY = 4


def sampled(sampler: tinker.SamplingClient, step: int) -> list[types.SampledSequence]:
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=step, stop=[])
    prompt = types.ModelInput.from_ints(PROMPT)
    return sampler.sample(prompt, num_samples=3, sampling_params=params).result().sequences


def datum(sequence: types.SampledSequence, advantage: float) -> types.Datum:
    tokens = [*PROMPT, *sequence.tokens]
    before = len(PROMPT) - 1
    logprobs = [0.0] * before + list(sequence.logprobs)
    advantages = [0.0] * before + [advantage] * len(sequence.tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:])),
            "logprobs": types.TensorData.from_numpy(np.array(logprobs, np.float32)),
            "advantages": types.TensorData.from_numpy(np.array(advantages, np.float32)),
        },
    )


def train(url: str, model: str, steps: int) -> dict[str, object]:
    service = tinker.ServiceClient(base_url=url, api_key="tml-crash")
    training = service.create_lora_training_client(base_model=model, rank=4, seed=1)
    losses, tokens, norms, paths = [], [], [], []
    for step in range(steps):
        sampler = training.save_weights_and_get_sampling_client(name=f"at-{step}")
        sequences = sampled(sampler, step)
        tokens.append([list(each.tokens) for each in sequences])
        data = [datum(each, 1.0 - place) for place, each in enumerate(sequences)]
        gradients = [training.forward_backward(data, "importance_sampling") for _ in range(2)]
        done = training.optim_step(types.AdamParams(learning_rate=0.05))
        losses.append([gradient.result().metrics["loss:sum"] for gradient in gradients])
        norms.append((done.result().metrics or {}).get("grad_norm"))
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            paths.append(training.save_state(f"step-{step}").result().path)
    paths.append(training.save_state("last").result().path)
    return {"losses": losses, "tokens": tokens, "norms": norms, "paths": paths}


if __name__ == "__main__":
    _, url, model, steps, out, jobs = sys.argv
    with ThreadPoolExecutor(int(jobs)) as pool:
        running = [pool.submit(train, url, model, int(steps)) for _ in range(int(jobs))]
        Path(out).write_text(json.dumps([each.result() for each in running]))
