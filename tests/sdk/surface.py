"""Calls every public method of the newest SDK's clients against a server, and prints what came.

    python surface.py BASE_URL MODEL

One line of JSON for each method: its name, and "works" or the text that it is refused with. A
method without a case below, or whose case fails, ends the run. An asynchronous twin is called by
the case of its synchronous one.
"""

import asyncio
import inspect
import json
import math
import sys
import traceback
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
import tinker
from tinker import types

CLIENTS = (
    tinker.ServiceClient,
    tinker.TrainingClient,
    tinker.SamplingClient,
    tinker.RestClient,
    tinker.AdminClient,
)
KEY = "tml-surface"
RANK = 8
PROMPT = types.ModelInput.from_ints([1, 2])
PARAMS = types.SamplingParams(max_tokens=3, seed=1, stop=[])
DATA = [
    types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array([2, 3, 4])),
            "weights": types.TensorData.from_numpy(np.ones(3, np.float32)),
        },
    )
]

Call = Callable[..., Any]
Case = Callable[["World", Call], None]
CASES: dict[str, Case] = {}


def case(*methods: str) -> Callable[[Case], Case]:
    """For methods that take and give the same."""

    def register(one: Case) -> Case:
        CASES.update(dict.fromkeys(methods, one))
        return one

    return register


class World:
    """What the cases share."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self.service = tinker.ServiceClient(base_url=url, api_key=KEY, project_id="surface")
        self.training = self.service.create_lora_training_client(model, rank=RANK).result()
        self.sampler = self.service.create_sampling_client(base_model=model).result()
        self.rest = tinker.RestClient(base_url=url, api_key=KEY)
        self.admin = tinker.AdminClient(base_url=url, api_key=KEY)
        self._names = count()

    @property
    def run(self) -> str:
        return self.training.model_id

    @property
    def session(self) -> str:
        return self.run.split(":train:")[0]

    def name(self) -> str:
        return f"n{next(self._names)}"

    def saved(self) -> str:
        return self.training.save_state(self.name()).result().path

    @cached_property
    def kept(self) -> str:
        return self.saved()

    def owner_of(self, client: type) -> Any:
        return {
            tinker.ServiceClient: self.service,
            tinker.TrainingClient: self.training,
            tinker.SamplingClient: self.sampler,
            tinker.RestClient: self.rest,
            tinker.AdminClient: self.admin,
        }[client]

    def checkpoints(self) -> dict[str, types.Checkpoint]:
        found = self.rest.list_checkpoints(self.run).result().checkpoints
        return {each.tinker_path: each for each in found}


# --- what a client says of itself ---------------------------------------------------------------


@case("ServiceClient.holder", "ServiceClient.get_telemetry", "TrainingClient.get_telemetry")
@case("SamplingClient.get_telemetry", "RestClient.get_telemetry", "AdminClient.get_telemetry")
def says_something(world: World, call: Call) -> None:
    call()


@case("ServiceClient.get_console_url", "TrainingClient.get_console_url")
def console(world: World, call: Call) -> None:
    """A page of the original's makers: made on the client, and not ours."""
    assert call().startswith("http")


# --- service ------------------------------------------------------------------------------------


@case("ServiceClient.get_server_capabilities", "RestClient.get_server_capabilities")
def capabilities(world: World, call: Call) -> None:
    assert world.model in [each.model_name for each in call().supported_models]


@case("ServiceClient.create_lora_training_client")
def create(world: World, call: Call) -> None:
    assert call(world.model, rank=RANK).get_info().lora_rank == RANK


@case("ServiceClient.create_training_client_from_state")
@case("ServiceClient.create_training_client_from_state_with_optimizer")
def from_state(world: World, call: Call) -> None:
    assert call(world.kept).get_info().lora_rank == RANK


@case("ServiceClient.copy_weights")
def copy_in_project(world: World, call: Call) -> None:
    copied(world, call(world.kept))


@case("RestClient.copy_weights")
def copy_to_project(world: World, call: Call) -> None:
    copied(world, call(world.kept, "other"))


def copied(world: World, path: str) -> None:
    assert path != world.kept
    again = world.service.create_training_client_from_state(path).result()
    assert loss_of(again) == loss_of(
        world.service.create_training_client_from_state(world.kept).result()
    )


def loss_of(training: tinker.TrainingClient) -> float:
    return training.forward(DATA, "cross_entropy").result().metrics["loss:sum"]


@case("ServiceClient.create_sampling_client", "TrainingClient.create_sampling_client")
def sampling_client(world: World, call: Call) -> None:
    path = world.training.save_weights_for_sampler(world.name()).result().path
    assert sampled(call(path))


def sampled(client: tinker.SamplingClient) -> list[int]:
    tokens = client.sample(PROMPT, 1, PARAMS).result().sequences[0].tokens
    assert len(tokens) == PARAMS.max_tokens
    return list(tokens)


@case("ServiceClient.create_custom_loss")
def custom_loss_handle(world: World, call: Call) -> None:
    """Kept and run by the client."""

    def weighted(logprobs: Any, weights: Any) -> Any:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/weighted:sum": loss}

    handle = call(weighted, {"logprobs": 1, "weights": 1})
    metrics = world.training.forward_backward_custom(DATA, handle).result().metrics
    assert math.isclose(metrics["loss:sum"], metrics["custom/weighted:sum"], rel_tol=1e-5)


@case("ServiceClient.create_rest_client")
def rest_client(world: World, call: Call) -> None:
    assert call().list_sessions().result().sessions


@case("ServiceClient.close")
def close(world: World, call: Call) -> None:
    service = tinker.ServiceClient(base_url=world.url, api_key=KEY)
    training = service.create_lora_training_client(world.model, rank=RANK).result()
    service.close("success").result()
    search = types.SessionSearchRequest(session_id=training.model_id.split(":train:")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        status = world.rest.search_sessions(search).result().sessions[0].status
    assert status.type == "client_finished"
    assert status.reason.type == "success"


# --- training -----------------------------------------------------------------------------------


@case("TrainingClient.forward", "TrainingClient.forward_backward")
def forward(world: World, call: Call) -> None:
    output = call(DATA, "cross_entropy")
    by_hand = -sum(output.loss_fn_outputs[0]["logprobs"].data)
    assert math.isclose(output.metrics["loss:sum"], by_hand, rel_tol=1e-5)


@case("TrainingClient.forward_backward_custom")
def custom(world: World, call: Call) -> None:
    def loss(data: Any, logprobs: Any) -> Any:
        total = -sum(lp.sum() for lp in logprobs)
        return total, {"mine:sum": float(total)}

    metrics = call(DATA, loss).metrics
    assert math.isclose(metrics["loss:sum"], metrics["mine:sum"], rel_tol=1e-5)


@case("TrainingClient.optim_step")
def step(world: World, call: Call) -> None:
    before = world.training.forward_backward(DATA, "cross_entropy").result().metrics["loss:sum"]
    call(types.AdamParams(learning_rate=0.01))
    assert loss_of(world.training) < before


@case("TrainingClient.save_state")
def save(world: World, call: Call) -> None:
    name = world.name()
    assert call(name).path == f"tinker://{world.run}/weights/{name}"


@case("TrainingClient.load_state", "TrainingClient.load_state_with_optimizer")
def load(world: World, call: Call) -> None:
    path, before = world.saved(), loss_of(world.training)
    world.training.forward_backward(DATA, "cross_entropy").result()
    world.training.optim_step(types.AdamParams(learning_rate=0.01)).result()
    assert loss_of(world.training) != before
    call(path)
    assert loss_of(world.training) == before


@case("TrainingClient.save_weights_for_sampler")
def save_for_sampler(world: World, call: Call) -> None:
    name = world.name()
    assert call(name).path == f"tinker://{world.run}/sampler_weights/{name}"


@case("TrainingClient.save_weights_external")
def save_external(world: World, call: Call) -> None:
    name = world.name()
    path = call(name, age_encryption_recipients=None).path
    assert path == f"tinker://{world.run}/external_weights/{name}"
    assert world.checkpoints()[path].checkpoint_type == "external"


@case("TrainingClient.save_weights_and_get_sampling_client")
def save_and_sample(world: World, call: Call) -> None:
    assert sampled(call())


@case("TrainingClient.get_info")
def info(world: World, call: Call) -> None:
    assert call().model_data.model_name == world.model


@case("TrainingClient.get_tokenizer", "SamplingClient.get_tokenizer")
def tokenizer(world: World, call: Call) -> None:
    """Loaded by the client, by the model's name."""
    assert call().decode(call().encode("select")).strip() == "select"


# --- sampling -----------------------------------------------------------------------------------


@case("SamplingClient.create")
def sampler_create(world: World, call: Call) -> None:
    assert sampled(call(world.service.holder, base_model=world.model))


@case("SamplingClient.sample")
def sample(world: World, call: Call) -> None:
    sequence = call(prompt=PROMPT, num_samples=1, sampling_params=PARAMS).sequences[0]
    assert len(sequence.tokens) == len(sequence.logprobs) == PARAMS.max_tokens


@case("SamplingClient.compute_logprobs")
def compute_logprobs(world: World, call: Call) -> None:
    first, second = call(PROMPT)
    assert first is None
    assert second < 0


@case("SamplingClient.get_base_model")
def base_model(world: World, call: Call) -> None:
    assert call() == world.model


@case("SamplingClient.get_sampler_handle")
def handle(world: World, call: Call) -> None:
    assert call()


@case("SamplingClient.from_sampler_handle")
def from_handle(world: World, call: Call) -> None:
    joined = [call(world.sampler.get_sampler_handle(), api_key=KEY) for _ in range(2)]
    assert [sampled(each) for each in joined] == [sampled(world.sampler)] * 2


@case("SamplingClient.on_queue_state_change")
def queue_state(world: World, call: Call) -> None:
    """Called by the SDK's own polls."""
    call(tinker.lib.queue_state_logger.QueueState.ACTIVE, "a reason")


# --- names --------------------------------------------------------------------------------------


@case("RestClient.get_training_run")
def get_run(world: World, call: Call) -> None:
    for scope in ("owned", "accessible"):
        run = call(world.run, access_scope=scope)
        assert (run.base_model, run.lora_rank) == (world.model, RANK)


@case("RestClient.get_training_run_by_tinker_path")
def get_run_by_path(world: World, call: Call) -> None:
    assert call(world.kept).training_run_id == world.run


@case("RestClient.get_weights_info_by_tinker_path")
def weights_info(world: World, call: Call) -> None:
    assert call(world.kept).lora_rank == RANK


@case("RestClient.list_training_runs")
def list_runs(world: World, call: Call) -> None:
    assert world.run in [each.training_run_id for each in call(limit=100).training_runs]
    assert call(project_id="nobody's").training_runs == []


@case("RestClient.list_checkpoints", "RestClient.list_user_checkpoints")
def list_checkpoints(world: World, call: Call) -> None:
    kept = world.kept
    arguments = (
        (world.run,) if "training_run_id" in inspect.signature(call.method).parameters else ()
    )
    assert kept in [each.tinker_path for each in call(*arguments).checkpoints]


@case("RestClient.get_external_weights_urls")
def external_urls(world: World, call: Call) -> None:
    path = world.training.save_weights_external(world.name()).result().path
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(call(path).urls)


@case("RestClient.delete_checkpoint")
def delete(world: World, call: Call) -> None:
    path = world.saved()
    call(world.run, path.split("/", 3)[3])
    assert path not in world.checkpoints()


@case("RestClient.delete_checkpoint_from_tinker_path")
def delete_by_path(world: World, call: Call) -> None:
    path = world.saved()
    call(path)
    assert path not in world.checkpoints()


@case("RestClient.publish_checkpoint_from_tinker_path")
def publish(world: World, call: Call) -> None:
    path = world.saved()
    call(path)
    call(path)
    assert world.checkpoints()[path].public


@case("RestClient.unpublish_checkpoint_from_tinker_path")
def unpublish(world: World, call: Call) -> None:
    path = world.saved()
    world.rest.publish_checkpoint_from_tinker_path(path).result()
    call(path)
    call(path)
    assert not world.checkpoints()[path].public


@case("RestClient.set_checkpoint_ttl_from_tinker_path")
def set_ttl(world: World, call: Call) -> None:
    path = world.saved()
    call(path, 3600)
    assert world.checkpoints()[path].expires_at is not None
    call(path, None)
    assert world.checkpoints()[path].expires_at is None


@case("RestClient.get_session")
def get_session(world: World, call: Call) -> None:
    assert world.run in call(world.session).training_run_ids


@case("RestClient.list_sessions")
def list_sessions(world: World, call: Call) -> None:
    assert world.session in call(limit=100).sessions


@case("RestClient.assign_session_project")
def assign_project(world: World, call: Call) -> None:
    call(world.session, "moved")
    runs = world.rest.list_training_runs(project_id="moved").result().training_runs
    assert world.run in [each.training_run_id for each in runs]


@case("RestClient.export_session_trace")
def trace(world: World, call: Call) -> None:
    with urllib.request.urlopen(call(world.session)) as answer:
        events = json.load(answer)["traceEvents"]
    assert {"ph": "M", "name": "process_name"}.items() <= events[0].items()


@case("RestClient.whoami")
def whoami(world: World, call: Call) -> None:
    """With `server.issue_jwts` on."""
    identity = call()
    assert identity.user_urn.startswith("tml:organization_user:")
    assert identity.email


@case("RestClient.get_sampler")
def get_sampler(world: World, call: Call) -> None:
    sampler_id = world.rest.get_session(world.session).result().sampler_ids[0]
    assert call(sampler_id).base_model == world.model


@case("RestClient.search_sessions")
def search(world: World, call: Call) -> None:
    page = call(types.SessionSearchRequest(session_id=world.session))
    assert [each.session_id for each in page.sessions] == [world.session]
    assert page.sessions[0].status.type == "active"


# --- administration -----------------------------------------------------------------------------


@case("RestClient.get_audit_log", "AdminClient.get_audit_log")
def audit(world: World, call: Call) -> None:
    world.saved()
    assert "checkpoint_create" in [each.event for each in call().entries]


@case("RestClient.get_billing_usage", "AdminClient.get_billing_usage")
def usage(world: World, call: Call) -> None:
    loss_of(world.training)
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    events = call(hour - timedelta(hours=1), hour + timedelta(hours=1)).data
    trained = [each.event_info for each in events if each.session_id == world.session]
    assert "training" in [each.type for each in trained]


@case("RestClient.get_current_checkpoint_storage_usage")
@case("AdminClient.get_current_checkpoint_storage_usage")
def storage(world: World, call: Call) -> None:
    world.saved()
    assert all(each.size_bytes > 0 and each.checkpoint_count > 0 for each in call().data)


# --- running them -------------------------------------------------------------------------------


class Method:
    """One method, called to its end."""

    def __init__(self, owner: Any, name: str) -> None:
        found = getattr(type(owner), name)
        self.method = getattr(owner, name) if callable(found) else lambda: getattr(owner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(inspect.unwrap(self.method)):
            return asyncio.run(self._awaited(*args, **kwargs))
        answer = self.method(*args, **kwargs)
        return answer.result() if hasattr(answer, "result_async") else answer

    async def _awaited(self, *args: Any, **kwargs: Any) -> Any:
        answer = await self.method(*args, **kwargs)
        return await answer if inspect.isawaitable(answer) else answer


def methods() -> Iterator[tuple[type, str]]:
    for client in CLIENTS:
        for name, found in vars(client).items():
            public = not name.startswith("_")
            if public and (callable(found) or isinstance(found, property | staticmethod)):
                yield client, name


def outcome(world: World, client: type, name: str) -> str:
    one = CASES[f"{client.__name__}.{name.removesuffix('_async')}"]
    try:
        one(world, Method(world.owner_of(client), name))
    except (tinker.TinkerError, RuntimeError) as refusal:
        return f"refused: {refusal}"
    except Exception as failure:  # noqa: BLE001 - the other methods are called all the same
        traceback.print_exception(failure)
        return f"FAILS: {failure!r}"
    return "works"


def main(url: str, model: str) -> None:
    warnings.simplefilter("ignore")
    world = World(url, model)
    for client, name in methods():
        line = {"method": f"{client.__name__}.{name}", "outcome": outcome(world, client, name)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
