"""Processes of real nodes behind a real nginx, if there is one."""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from openrl.config import Config

NGINX = shutil.which("nginx") or os.environ.get("OPENRL_TEST_NGINX")

_CONF = """
worker_processes 1;
daemon off;
pid {where}/nginx.pid;
error_log {where}/error.log;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {where}/body;
    proxy_temp_path {where}/proxy;
    fastcgi_temp_path {where}/f;
    uwsgi_temp_path {where}/u;
    scgi_temp_path {where}/s;
    upstream openrl {{ {servers} keepalive 16; }}
    server {{
        listen 127.0.0.1:{port};
        keepalive_timeout 2s;
        client_max_body_size 256m;
        location / {{
            proxy_pass http://openrl;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $host;
            proxy_read_timeout {seconds}s;
            proxy_connect_timeout 1s;
            proxy_buffering off;
            proxy_request_buffering off;
        }}
    }}
}}
"""


class Process:
    """One node. Its settings come from the environment."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.config.cluster.address

    def start(self) -> None:
        c = self.config
        settings = {
            "SERVER__HOST": c.host,
            "SERVER__PORT": str(c.port),
            "SERVER__DATA": str(c.data),
            "SERVER__POLL_SECONDS": str(c.poll_seconds),
            "SERVER__DRAIN_SECONDS": "1",
            "ENGINE__KIND": "fake",
            "CLUSTER__NODE": c.cluster.node,
            "CLUSTER__ADDRESS": c.cluster.address,
            "CLUSTER__PEERS": c.cluster.peers,
            "CLUSTER__SECRET": c.cluster.secret,
            "CLUSTER__REFRESH_SECONDS": str(c.cluster.refresh_seconds),
            "CLUSTER__AWAY_SECONDS": str(c.cluster.away_seconds),
            "MODELS": ",".join(model.name for model in c.models),
        }
        env = os.environ | {f"OPENRL_{name}": value for name, value in settings.items()}
        command = [sys.executable, "-m", "openrl.cli", "serve"]
        self._child = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
        _until_open(f"{self.url}/healthz")

    def send(self, number: signal.Signals) -> None:
        assert self._child is not None
        self._child.send_signal(number)

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None


def _until_open(url: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


@contextmanager
def processes(made: Mapping[str, Config]) -> Iterator[dict[str, Process]]:
    nodes = {name: Process(config) for name, config in made.items()}
    try:
        for each in nodes.values():
            each.start()
        yield nodes
    finally:
        for each in nodes.values():
            each.kill()


@contextmanager
def nginx(where: Path, port: int, nodes: Mapping[str, Process], seconds: int) -> Iterator[str]:
    """In front of the nodes, in turn; it waits for an answer for so many seconds."""
    assert NGINX is not None
    servers = " ".join(
        f"server {each.url.removeprefix('http://')} fail_timeout=1s;" for each in nodes.values()
    )
    conf = where / "nginx.conf"
    conf.write_text(_CONF.format(where=where, port=port, servers=servers, seconds=seconds))
    child = subprocess.Popen([NGINX, "-p", str(where), "-c", str(conf)], stderr=subprocess.DEVNULL)
    try:
        _until_open(f"http://127.0.0.1:{port}/healthz")
        yield f"http://127.0.0.1:{port}"
    finally:
        child.terminate()
        child.wait(10)
