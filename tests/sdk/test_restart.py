"""The unmodified SDK, its samples in flight, and a server that is killed and started again."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import tinker
from support.node import MODEL
from tinker import types

pytestmark = pytest.mark.filterwarnings("ignore")

KEY = "tml-restart"
SAMPLES = 300  # more than a block of marks
PARAMS = types.SamplingParams(max_tokens=4, seed=1, stop=[])
SECONDS = 60.0


class Server:
    """On one port and one data directory, life after life."""

    def __init__(self, data: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.data = data
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "support.held", str(self.port), str(self.data)]
        path = os.pathsep.join(sys.path)
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, "the server did not start"

    def end(self, how: signal.Signals) -> None:
        self.process.send_signal(how)
        self.process.wait(30)

    def waiting(self) -> int:
        """How many requests it has accepted and not answered."""
        answer = httpx.get(f"{self.url}/api/v1/openrl/statistics", headers={"X-API-Key": KEY})
        requests = answer.json()["requests"]
        return int(requests["waiting"] + requests["running"])


@pytest.fixture
def server(tmp_path: Path):
    server = Server(tmp_path)
    yield server
    server.end(signal.SIGKILL)


def until(holds: Callable[[], bool]) -> None:
    """Each look is a request to the server, and paces itself."""
    for _ in range(5000):
        if holds():
            return
    raise AssertionError("it did not come to that")


def test_samples_in_flight_at_a_kill_come_from_the_next_life(server: Server) -> None:
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    sampler = service.create_sampling_client(base_model=MODEL).result()
    assert sampler.holder.get_client_config().sample_use_retrieve_futures
    prompts = [types.ModelInput.from_ints([1, 2 + i]) for i in range(SAMPLES)]
    pending = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts]
    until(lambda: server.waiting() == SAMPLES)
    server.end(signal.SIGKILL)
    (server.data / "go").touch()
    server.start()
    got = [each.result(SECONDS).sequences[0].tokens for each in pending]
    again = [sampler.sample(prompt, 1, PARAMS) for prompt in prompts[:3]]
    assert got[:3] == [each.result(SECONDS).sequences[0].tokens for each in again]
    assert all(len(tokens) == PARAMS.max_tokens for tokens in got)


def test_samples_of_a_sampler_that_is_gone_fail_and_do_not_hang(server: Server) -> None:
    service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    training = service.create_lora_training_client(MODEL, rank=4).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    pending = [sampler.sample(types.ModelInput.from_ints([1]), 1, PARAMS) for _ in range(3)]
    until(lambda: server.waiting() == 3)
    server.end(signal.SIGKILL)
    (server.data / "go").touch()
    server.start()
    said: list[str] = []
    for each in pending:
        try:
            assert each.result(SECONDS).sequences
        except tinker.TinkerError as error:  # its weights were never named
            said.append(str(error))
    assert all("sampler" in text for text in said)
