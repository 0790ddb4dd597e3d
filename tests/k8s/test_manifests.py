"""The manifests agree with the server that they start, and render."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from openrl import config
from openrl.api import middleware
from openrl.commands import cli

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"


def read(name: str) -> Any:
    return yaml.safe_load((K8S / name).read_text())


@pytest.fixture
def pod() -> Any:
    return read("daemonset.yaml")["spec"]["template"]["spec"]


@pytest.fixture
def settings() -> config.Config:
    return config.load(env={}, file=K8S / "openrl.toml")


def test_the_command_is_one_that_the_server_takes(pod: Any) -> None:
    command, *arguments = pod["containers"][0]["args"]
    assert command == "serve"
    there = [str(K8S / "openrl.toml") if "/etc/openrl" in each else each for each in arguments]
    shown = CliRunner().invoke(cli, ["config", "show", *there])
    assert shown.exit_code == 0, shown.output
    assert 'host = "0.0.0.0"' in shown.output
    assert 'data = "/data"' in shown.output


def test_the_probes_need_no_key(pod: Any) -> None:
    container = pod["containers"][0]
    probes = {container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness")}
    assert probes == {"/healthz"}
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert {"/healthz", "/readyz"} <= middleware.OPEN_ROUTES


def test_the_port_is_the_servers(pod: Any, settings: config.Config) -> None:
    (port,) = pod["containers"][0]["ports"]
    (service,) = read("service.yaml")["spec"]["ports"]
    assert port["containerPort"] == service["port"] == settings.port
    assert service["targetPort"] == port["name"]


def test_draining_ends_before_the_pod_is_killed(pod: Any, settings: config.Config) -> None:
    assert pod["terminationGracePeriodSeconds"] >= settings.drain_seconds + 20


def test_environment_variables_are_settings(pod: Any) -> None:
    names = {each["name"] for each in pod["containers"][0]["env"]} - {"HF_TOKEN"}
    keys = {n.removeprefix("OPENRL_").lower().replace("__", ".") for n in names}
    assert keys <= config.known_keys().keys()


def test_every_mount_has_a_volume(pod: Any) -> None:
    volumes = {each["name"] for each in pod["volumes"]}
    for container in pod["containers"] + pod["initContainers"]:
        assert {each["name"] for each in container["volumeMounts"]} <= volumes


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_it_renders_with_one_label_for_pods_and_selectors() -> None:
    done = subprocess.run(["kubectl", "kustomize", K8S], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
    assert made.keys() == {"Namespace", "ConfigMap", "NetworkPolicy", "Service", "DaemonSet"}
    label = {"app.kubernetes.io/name": "openrl"}
    assert made["Service"]["spec"]["selector"] == label
    assert made["DaemonSet"]["spec"]["selector"]["matchLabels"] == label
    assert made["DaemonSet"]["spec"]["template"]["metadata"]["labels"] == label
    assert "openrl.toml" in made["ConfigMap"]["data"]
