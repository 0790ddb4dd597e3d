"""Three processes on three addresses behind a real nginx that is impatient. One is killed, one
stopped: clients of the others don't notice, and their own wait until it is back."""

import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import tinker
from support.node import CONFIG
from support.nodes import configs, free_ports
from support.proxied import NGINX, nginx, processes
from tinker import types

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(NGINX is None, reason="no nginx: put it on PATH, or in OPENRL_TEST_NGINX"),
]

READ_SECONDS = 3
"""nginx's time-out; polls are held for half of it."""
SERVED = {"a": ("fake/a",), "b": ("fake/b",), "c": ("fake/c",)}


def trained(url: str, base: str) -> tinker.TrainingClient:
    service = tinker.ServiceClient(base_url=url, api_key=f"tml-{base[-1]}")
    return service.create_lora_training_client(base_model=base, rank=4).result()


def step(client: tinker.TrainingClient, seconds: float) -> float:
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )
    loss = client.forward_backward([datum], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result(seconds)
    return loss.result(seconds).metrics["loss:sum"]


def test_a_node_is_killed_and_another_stopped(tmp_path: Path) -> None:
    made = configs(tmp_path, SERVED, replace(CONFIG, poll_seconds=READ_SECONDS / 2))
    (port,) = free_ports(1)
    with processes(made) as nodes, nginx(tmp_path, port, nodes, READ_SECONDS) as url:
        clients = {base: trained(url, base) for (base,) in SERVED.values()}
        alone = {base: trained(url, base) for base in clients}  # nothing happens to these
        before = {base: step(client, 20) for base, client in clients.items()}
        expected = {base: [step(client, 20) for _ in range(6)] for base, client in alone.items()}
        assert all(len(set(losses)) == len(losses) for losses in expected.values())
        assert before == {base: losses[0] for base, losses in expected.items()}
        with ThreadPoolExecutor(1) as waiting:
            nodes["b"].kill()
            held = waiting.submit(step, clients["fake/b"], 60)
            for n in (1, 2, 3):
                for base in ("fake/a", "fake/c"):
                    assert step(clients[base], 20) == expected[base][n]
            assert not held.done()
            nodes["b"].start()
            assert held.result(60) == expected["fake/b"][1]
            nodes["c"].send(signal.SIGSTOP)
            held = waiting.submit(step, clients["fake/c"], 60)
            assert step(clients["fake/a"], 20) == expected["fake/a"][4]
            assert step(clients["fake/b"], 20) == expected["fake/b"][2]
            nodes["c"].send(signal.SIGCONT)
            assert held.result(60) == expected["fake/c"][4]
