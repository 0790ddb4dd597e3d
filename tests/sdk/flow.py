"""The whole of a training script with the unmodified SDK, whichever version is on the path.

    python flow.py BASE_URL MODEL EXPECTED_VERSION

Written against the public methods that every version since 0.12 has. Exits with an
AssertionError at the first thing that is not as it should be.
"""

import asyncio
import io
import math
import sys
import tarfile
import urllib.request
from datetime import UTC, datetime
from importlib.metadata import version

import numpy as np
import tinker
from tinker import types


def datum(tokens: list[int], targets: list[int], weights: list[float]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(targets, dtype=np.int64)),
            "weights": types.TensorData.from_numpy(np.array(weights, dtype=np.float32)),
        },
    )


DATA = [datum([1, 2, 3], [2, 3, 4], [0, 1, 1]), datum([5, 6], [6, 7], [1, 1])]


def loss_of(output: types.ForwardBackwardOutput) -> float:
    return output.metrics["loss:sum"]


def logprobs_of(output: types.ForwardBackwardOutput) -> list[list[float]]:
    return [list(record["logprobs"].data) for record in output.loss_fn_outputs]


def train(service: tinker.ServiceClient, model: str) -> tinker.TrainingClient:
    training = service.create_lora_training_client(base_model=model, rank=8, seed=3)
    info = training.get_info()
    assert info.model_data.model_name == model
    assert info.lora_rank == 8

    output = training.forward(DATA, "cross_entropy").result()
    logprobs = logprobs_of(output)
    assert [len(each) for each in logprobs] == [3, 2]
    by_hand = -sum(
        weight * logprob
        for each, lps in zip(DATA, logprobs, strict=True)
        for weight, logprob in zip(each.loss_fn_inputs["weights"].data, lps, strict=True)
    )
    assert math.isclose(loss_of(output), by_hand, rel_tol=1e-4)

    losses = []
    for _ in range(4):  # both are sent before either is awaited
        gradient = training.forward_backward(DATA, "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=0.05))
        losses.append(loss_of(gradient.result()))
        step.result()
    assert losses[-1] < losses[0], losses

    rollout = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array([2, 3, 4])),
            "logprobs": types.TensorData.from_numpy(np.array(logprobs[0], dtype=np.float32)),
            "advantages": types.TensorData.from_numpy(np.array([0, 1, -1], dtype=np.float32)),
        },
    )
    for loss in ("importance_sampling", "ppo"):
        assert math.isfinite(loss_of(training.forward_backward([rollout], loss).result())), loss
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    return training


def sample(training: tinker.TrainingClient, service: tinker.ServiceClient, model: str) -> None:
    prompt = types.ModelInput.from_ints([1, 2])
    params = types.SamplingParams(max_tokens=5, temperature=1.0, seed=7, stop=[])
    ephemeral = training.save_weights_and_get_sampling_client(name="now")
    named = training.save_weights_for_sampler("for-sampling").result()
    assert named.path.endswith("/sampler_weights/for-sampling")
    by_path = training.create_sampling_client(named.path)
    base = service.create_sampling_client(base_model=model)
    sampled = [
        client.sample(prompt, num_samples=2, sampling_params=params).result()
        for client in (ephemeral, by_path, base)
    ]
    for each in sampled:
        assert [len(sequence.tokens) for sequence in each.sequences] == [5, 5]
        for sequence in each.sequences:
            assert sequence.stop_reason == "length"
            assert len(sequence.logprobs) == 5
            assert all(math.isfinite(lp) and lp <= 0 for lp in sequence.logprobs)
    # The same weights and seed: an ephemeral sampler and a checkpoint cannot differ.
    assert sampled[0].sequences[0].tokens == sampled[1].sequences[0].tokens

    tokens = [1, 2, *sampled[0].sequences[0].tokens]
    scored = by_path.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert scored[0] is None
    assert np.allclose(scored[2:], sampled[0].sequences[0].logprobs, atol=1e-4)
    trainers = training.forward([datum(tokens[:-1], tokens[1:], [1.0] * 6)], "cross_entropy")
    assert np.allclose(scored[1:], logprobs_of(trainers.result())[0], atol=1e-4)

    top = base.sample(
        prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=2
    ).result()
    assert top.topk_prompt_logprobs[0] is None
    assert len(top.topk_prompt_logprobs[1]) == 2


def save_and_load(training: tinker.TrainingClient, service: tinker.ServiceClient) -> None:
    before = logprobs_of(training.forward(DATA, "cross_entropy").result())
    path = training.save_state("kept").result().path
    assert path.endswith("/weights/kept")
    again = service.create_training_client_from_state(path)
    assert again.get_info().lora_rank == 8
    after = logprobs_of(again.forward(DATA, "cross_entropy").result())
    assert np.allclose(np.concatenate(before), np.concatenate(after), atol=1e-6)

    resumed = service.create_training_client_from_state_with_optimizer(path)
    for client in (training, resumed):
        client.forward_backward(DATA, "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=0.01)).result()
    one, other = (
        np.concatenate(logprobs_of(client.forward(DATA, "cross_entropy").result()))
        for client in (training, resumed)
    )
    assert np.allclose(one, other, atol=1e-6)
    training.load_state(path).result()
    back = logprobs_of(training.forward(DATA, "cross_entropy").result())
    assert np.allclose(np.concatenate(before), np.concatenate(back), atol=1e-6)


def custom_loss(training: tinker.TrainingClient) -> None:
    def loss(data, logprobs):
        total = -sum(lp.sum() for lp in logprobs)
        return total, {"custom:sum": float(total)}

    output = training.forward_backward_custom(DATA, loss).result()
    assert math.isclose(output.metrics["loss:sum"], output.metrics["custom:sum"], rel_tol=1e-5)
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()


def failures(training: tinker.TrainingClient, service: tinker.ServiceClient, model: str) -> None:
    misshapen = datum([1, 2, 3], [2, 3], [1, 1])
    error = refused(training.forward_backward([misshapen], "cross_entropy"))
    assert isinstance(error, tinker.RequestFailedError)
    assert "datum 0" in str(error)
    assert error.category.value == "user"
    training.forward_backward(DATA, "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()

    base = service.create_sampling_client(base_model=model)
    too_long = types.SamplingParams(max_tokens=10**6)
    error = refused(base.sample(types.ModelInput.from_ints([1]), 1, too_long))
    assert isinstance(error, tinker.BadRequestError)
    assert "context window" in str(error)


def refused(future) -> Exception:
    try:
        future.result()
    except tinker.TinkerError as error:
        return error
    raise AssertionError("what makes no sense was accepted")


def rest(service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    client = service.create_rest_client()
    run_id = training.model_id
    runs = client.list_training_runs(limit=10).result()
    assert run_id in [run.training_run_id for run in runs.training_runs]
    assert client.get_training_run(run_id).result().lora_rank == 8
    found = client.list_checkpoints(run_id).result().checkpoints
    kinds = {each.checkpoint_id: each.checkpoint_type for each in found}
    assert kinds == {"weights/kept": "training", "sampler_weights/for-sampling": "sampler"}
    kept = f"tinker://{run_id}/weights/kept"
    client.publish_checkpoint_from_tinker_path(kept).result()
    assert [each.public for each in client.list_checkpoints(run_id).result().checkpoints] == [
        each.checkpoint_id == "weights/kept" for each in found
    ]
    client.unpublish_checkpoint_from_tinker_path(kept).result()
    if hasattr(client, "get_checkpoint_archive_url_from_tinker_path"):  # until 0.35
        archive(client.get_checkpoint_archive_url_from_tinker_path(kept).result())
    client.delete_checkpoint(run_id, "sampler_weights/for-sampling").result()
    assert len(client.list_checkpoints(run_id).result().checkpoints) == 1
    session = run_id.split(":train:")[0]
    assert run_id in client.get_session(session).result().training_run_ids


def archive(link: "types.CheckpointArchiveUrlResponse") -> None:
    with urllib.request.urlopen(link.url) as response:
        body = io.BytesIO(response.read())
    with tarfile.open(fileobj=body) as tar:
        names = set(tar.getnames())
    assert names == {"adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"}
    assert link.expires.replace(tzinfo=UTC) > datetime.now(UTC)


async def asynchronously(service: tinker.ServiceClient, model: str) -> None:
    training = await service.create_lora_training_client_async(base_model=model, rank=4)
    gradient = await training.forward_backward_async(DATA, "cross_entropy")
    step = await training.optim_step_async(types.AdamParams(learning_rate=1e-3))
    assert math.isfinite(loss_of(await gradient.result_async()))
    await step.result_async()
    sampler = await training.save_weights_and_get_sampling_client_async("a")
    prompt = types.ModelInput.from_ints([1, 2])
    params = types.SamplingParams(max_tokens=3, stop=[])
    many = await asyncio.gather(
        *(sampler.sample_async(prompt, num_samples=2, sampling_params=params) for _ in range(20))
    )
    assert all(len(each.sequences) == 2 for each in many)


def main(url: str, model: str, expected: str) -> None:
    assert tinker.__version__ == expected or version("tinker") == expected, tinker.__file__
    service = tinker.ServiceClient(base_url=url, api_key="tml-flow")
    offered = service.get_server_capabilities().supported_models
    assert model in [each.model_name for each in offered]
    training = train(service, model)
    sample(training, service, model)
    save_and_load(training, service)
    failures(training, service, model)
    rest(service, training)
    asyncio.run(asynchronously(service, model))
    if "torch" in sys.modules or __import__("importlib").util.find_spec("torch"):
        custom_loss(training)
    print("the flow is whole")


if __name__ == "__main__":
    main(*sys.argv[1:])
