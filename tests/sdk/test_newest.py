"""What only the newest SDK does, in this process: its protobuf and ours live side by side."""

import asyncio
import math

import numpy as np
import pytest
import tinker
from support.node import MODEL
from tinker import types

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def service(url: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=url, api_key="tml-newest")


def one(tokens: list[int], **inputs: np.ndarray) -> types.Datum:
    given = {name: types.TensorData.from_numpy(array) for name, array in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=given)


def train_on(training: tinker.TrainingClient, datum: types.Datum, loss: str, **config: float):
    return training.forward_backward([datum], loss, config or None).result()


async def test_clients_are_awaited(service: tinker.ServiceClient) -> None:
    training = await service.create_lora_training_client(base_model=MODEL, rank=4)
    targets, weights = np.array([2, 3]), np.array([1, 1], np.float32)
    data = [one([1, 2], target_tokens=targets, weights=weights)]
    pending = [training.forward_backward(data, "cross_entropy") for _ in range(3)]
    pending.append(training.optim_step(types.AdamParams(learning_rate=0.01)))
    done = await asyncio.gather(*pending)
    assert len({output.metrics["loss:sum"] for output in done[:3]}) == 1
    for kind in ("snapshot", "inflight"):
        sampler = await training.save_weights_and_get_sampling_client(kind=kind)
        sampled = await sampler.sample(
            types.ModelInput.from_ints([1]), 2, types.SamplingParams(max_tokens=4, stop=[])
        )
        assert [len(each.tokens) for each in sampled.sequences] == [4, 4]
        assert len({each.sequence_id for each in sampled.sequences}) == 2


def test_sparse_and_dense_targets_are_the_same(service: tinker.ServiceClient) -> None:
    torch = pytest.importorskip("torch")
    training = service.create_lora_training_client(base_model=MODEL, rank=4).result()
    targets = np.zeros((4, 8), np.int64)
    weights = np.zeros((4, 8), np.float32)
    targets[1, 2], targets[3, 0] = 7, 9
    weights[1, 2], weights[3, 0] = 1.0, -0.5
    dense = one([1, 2, 3, 4], target_tokens=targets, weights=weights)
    sparse = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3, 4]),
        loss_fn_inputs={
            "target_tokens": torch.from_numpy(targets),
            "weights": torch.from_numpy(weights),
        },
    )
    assert sparse.loss_fn_inputs["weights"].sparse_crow_indices is not None
    outputs = [train_on(training, each, "cross_entropy") for each in (dense, sparse)]
    assert outputs[0].metrics["loss:sum"] == outputs[1].metrics["loss:sum"]
    assert outputs[0].loss_fn_outputs[0]["logprobs"].shape == [4, 8]
    expected = -(weights * outputs[0].loss_fn_outputs[0]["logprobs"].to_numpy()).sum()
    assert math.isclose(outputs[0].metrics["loss:sum"], expected, rel_tol=1e-5)


def test_a_request_of_many_chunks_is_one(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(base_model=MODEL, rank=4).result()
    data = [
        one([i % 50 + 1], target_tokens=np.array([i % 40]), weights=np.ones(1, np.float32))
        for i in range(1100)  # the SDK sends at most 1,024 at once
    ]
    output = training.forward_backward(data, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 1100
    logprobs = [float(each["logprobs"].data[0]) for each in output.loss_fn_outputs]
    assert math.isclose(output.metrics["loss:sum"], -sum(logprobs), rel_tol=1e-4)


@pytest.mark.parametrize(
    ("loss", "config", "named"),
    [
        ("ppo", {"odd_key": 1.0}, "odd_key"),
        ("cross_entropy", {"beta": 1.0}, "beta"),
        ("stable_reinforce", {}, "stable_reinforce"),
    ],
)
def test_losses_and_keys_that_are_not_there(
    service: tinker.ServiceClient, loss: str, config: dict, named: str
) -> None:
    training = service.create_lora_training_client(base_model=MODEL, rank=4).result()
    datum = one([1], target_tokens=np.array([1]), weights=np.ones(1, np.float32))
    with pytest.raises(tinker.RequestFailedError, match=named):
        train_on(training, datum, loss, **config)
    assert train_on(training, datum, "cross_entropy").metrics


def test_values_that_are_no_numbers(service: tinker.ServiceClient) -> None:
    training = service.create_lora_training_client(base_model=MODEL, rank=4).result()
    for value in (np.nan, np.inf):
        weights = np.array([1, value], np.float32)
        bad = one([1, 2], target_tokens=np.array([1, 2]), weights=weights)
        with pytest.raises(tinker.RequestFailedError, match="datum 0: weights"):
            train_on(training, bad, "cross_entropy")


def test_an_unknown_base_model(service: tinker.ServiceClient) -> None:
    with pytest.raises((tinker.APIStatusError, tinker.RequestFailedError), match="no/such"):
        service.create_lora_training_client(base_model="no/such", rank=4).result()
    with pytest.raises(tinker.APIStatusError, match="no/such"):
        service.create_sampling_client(base_model="no/such").result()


def test_a_bad_key(url: str) -> None:
    with pytest.raises(tinker.AuthenticationError, match="X-API-Key"):
        tinker.RestClient(base_url=url, api_key="tml-bad key")


def test_a_closed_service_finishes_its_session(url: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key="tml-closing")
    training = service.create_lora_training_client(base_model=MODEL, rank=4).result()
    session = training.model_id.split(":train:")[0]
    service.close("success")
    again = tinker.RestClient(base_url=url, api_key="tml-closing")
    assert again.get_session(session).result().training_run_ids == [training.model_id]
    assert session in again.list_sessions().result().sessions
