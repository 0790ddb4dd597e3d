"""Every overlay renders, hangs together, and agrees with the server that it starts."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.kustomized import K8S, OVERLAYS, named, needs_kubectl, objects, only, overlay, pod

from openrl import config
from openrl.api import middleware
from openrl.commands import cli

pytestmark = needs_kubectl


@pytest.fixture(params=OVERLAYS)
def found(request: pytest.FixtureRequest) -> list[Any]:
    return overlay(request.param)


def environment(found: list[Any]) -> dict[str, str]:
    pairs = pod(found)["containers"][0]["env"]
    return {each["name"]: each.get("value", "") for each in pairs}


def settings(found: list[Any], tmp_path: Path) -> config.Config:
    """As the pod has them: the ConfigMap's file, under the variables that are not from Secrets."""
    file = tmp_path / "openrl.toml"
    file.write_text(only(found, "ConfigMap")["data"]["openrl.toml"])
    plain = {k: v for k, v in environment(found).items() if k.startswith("OPENRL_") and v}
    return config.load(env=plain, file=file)


def test_the_command_is_one_that_the_server_takes(found: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "openrl.toml"
    file.write_text(only(found, "ConfigMap")["data"]["openrl.toml"])
    command, *arguments = pod(found)["containers"][0]["args"]
    assert command == "serve"
    assert "/etc/openrl/openrl.toml" in arguments
    there = [str(file) if each == "/etc/openrl/openrl.toml" else each for each in arguments]
    shown = CliRunner().invoke(cli, ["config", "show", *there])
    assert shown.exit_code == 0, shown.output
    assert 'host = "0.0.0.0"' in shown.output


def test_environment_variables_are_settings(found: list[Any]) -> None:
    ours = {name for name in environment(found) if name.startswith("OPENRL_")}
    keys = {n.removeprefix("OPENRL_").lower().replace("__", ".") for n in ours}
    assert keys <= config.known_keys().keys()


def test_the_probes_are_routes_that_need_no_key(found: list[Any]) -> None:
    container = pod(found)["containers"][0]
    probes = {k: container[f"{k}Probe"]["httpGet"] for k in ("startup", "liveness", "readiness")}
    assert probes["startup"]["path"] == probes["liveness"]["path"] == "/api/v1/healthz"
    assert probes["readiness"]["path"] == "/api/v1/readyz"
    assert {each["path"] for each in probes.values()} <= middleware.OPEN_ROUTES
    assert {each["port"] for each in probes.values()} == {"http"}


def test_ports_are_the_servers(found: list[Any], tmp_path: Path) -> None:
    (port,) = pod(found)["containers"][0]["ports"]
    assert port == {"name": "http", "containerPort": settings(found, tmp_path).port}
    services = [each for each in found if each["kind"] == "Service"]
    assert {named(each) for each in services} == {"openrl", "openrl-nodes"}
    for service in services:
        (exposed,) = service["spec"]["ports"]
        assert exposed == {"name": "http", "port": 8000, "targetPort": "http"}
    assert only(found, "Service", "openrl-nodes")["spec"]["clusterIP"] == "None"


def test_draining_ends_before_the_pod_is_killed(found: list[Any], tmp_path: Path) -> None:
    stop = pod(found)["containers"][0].get("lifecycle")
    before = int(stop["preStop"]["exec"]["command"][1]) if stop else 0
    grace = pod(found)["terminationGracePeriodSeconds"]
    assert grace >= before + settings(found, tmp_path).drain_seconds + 15  # for snapshots


def test_pods_mount_and_name_what_is_there(found: list[Any]) -> None:
    spec = pod(found)
    volumes = {each["name"] for each in spec["volumes"]}
    assert {each["name"] for each in spec["containers"][0]["volumeMounts"]} == volumes
    claims = {named(each) for each in found if each["kind"] == "PersistentVolumeClaim"}
    assert claims == {"openrl-homes"}
    maps = {v["configMap"]["name"] for v in spec["volumes"] if "configMap" in v}
    assert maps == {named(each) for each in found if each["kind"] == "ConfigMap"}
    assert spec["serviceAccountName"] == named(only(found, "ServiceAccount"))


def test_all_is_in_one_namespace_and_selected_by_one_label(found: list[Any]) -> None:
    whole = {"Namespace", "PersistentVolume"}
    assert {o["metadata"].get("namespace") for o in found if o["kind"] not in whole} == {"openrl"}
    label = {"app.kubernetes.io/name": "openrl"}
    daemons = only(found, "DaemonSet")["spec"]
    assert daemons["selector"]["matchLabels"] == daemons["template"]["metadata"]["labels"] == label
    for service in (o for o in found if o["kind"] == "Service"):
        assert service["spec"]["selector"] == label
    assert only(found, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == label


def test_gpus_are_asked_for_and_tolerated_where_there_are_some() -> None:
    accelerators = {
        "gke": "nvidia-l4",
        "gke-a100": "nvidia-tesla-a100",
        "gke-h100": "nvidia-h100-80gb",
        "gke-spot": "nvidia-l4",
    }
    for name, accelerator in accelerators.items():
        spec = pod(overlay(name))
        assert spec["nodeSelector"]["cloud.google.com/gke-accelerator"] == accelerator
        assert "openrl.dev/node" not in spec["nodeSelector"]
    for name in OVERLAYS:
        spec = pod(overlay(name))
        gpus = spec["containers"][0]["resources"]["limits"].get("nvidia.com/gpu")
        assert gpus == (None if name in ("cpu", "single-node") else 1), name
        assert "nvidia.com/gpu" in {each["key"] for each in spec["tolerations"]}


def test_the_gateway_waits_longer_than_a_poll(tmp_path: Path) -> None:
    found = overlay("gke")
    held = settings(found, tmp_path).poll_seconds
    assert only(found, "GCPBackendPolicy")["spec"]["default"]["timeoutSec"] >= 2 * held
    health = only(found, "HealthCheckPolicy")["spec"]["default"]["config"]["httpHealthCheck"]
    assert health["requestPath"] in middleware.OPEN_ROUTES
    for kind in ("GCPBackendPolicy", "HealthCheckPolicy"):
        assert only(found, kind)["spec"]["targetRef"]["name"] == "openrl"
    (listener,) = only(found, "Gateway")["spec"]["listeners"]
    assert listener["protocol"] == "HTTPS"
    assert only(found, "HTTPRoute")["spec"]["hostnames"] == [listener["hostname"]]


# Components that no overlay has.


def with_component(name: str, tmp_path: Path) -> list[Any]:
    (tmp_path / "k8s").symlink_to(K8S)
    inner = tmp_path / "k8s" / "overlays" / "local-disks"
    target = tmp_path / "made"
    target.mkdir()
    (target / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nnamespace: openrl\n"
        f"resources: [{_relative(inner, target)}]\n"
        f"components: [{_relative(K8S / 'components' / name, target)}]\n"
    )
    return objects(target)


def _relative(path: Path, start: Path) -> str:

    return os.path.relpath(path.resolve(), start.resolve())


def test_the_ingress_waits_longer_than_a_poll(tmp_path: Path) -> None:
    found = with_component("ingress-nginx", tmp_path)
    ingress = only(found, "Ingress")
    said = ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-read-timeout"]
    assert int(said) >= 2 * settings(found, tmp_path).poll_seconds
    (tls,) = ingress["spec"]["tls"]
    assert tls["hosts"] == [ingress["spec"]["rules"][0]["host"]]


def test_the_service_monitor_finds_the_headless_service(tmp_path: Path) -> None:
    found = with_component("service-monitor", tmp_path)
    wanted = only(found, "ServiceMonitor")["spec"]["selector"]["matchLabels"].items()
    matched = [
        named(each)
        for each in found
        if each["kind"] == "Service" and wanted <= each["metadata"]["labels"].items()
    ]
    assert matched == ["openrl-nodes"]


def test_variables_of_many_nodes_come_after_those_they_name(tmp_path: Path) -> None:
    found = with_component("many-nodes", tmp_path)
    order = [each["name"] for each in pod(found)["containers"][0]["env"]]
    assert order.index("NODE_NAME") < order.index("OPENRL_CLUSTER__NODE")
    assert order.index("POD_IP") < order.index("OPENRL_CLUSTER__ADDRESS")
    services = {named(o): o["spec"] for o in found if o["kind"] == "Service"}
    assert services["openrl"]["sessionAffinity"] == "None"


def test_many_nodes_sets_what_the_server_knows(tmp_path: Path) -> None:
    if "cluster.node" not in config.known_keys():
        pytest.skip("this version has no [cluster]")
    test_environment_variables_are_settings(with_component("many-nodes", tmp_path))


def test_the_demo_model_is_served_where_none_is_named() -> None:
    file = only(overlay("cpu"), "ConfigMap")["data"]["openrl.toml"]
    assert "models" not in tomllib.loads(file)
