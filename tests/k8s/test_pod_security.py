"""The Pod Security Standard "restricted", rule by rule as Kubernetes publishes it.

https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from support.kustomized import OVERLAYS, needs_kubectl, only, overlay, pod

pytestmark = needs_kubectl

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
PROFILES = ("RuntimeDefault", "Localhost")


def violations(spec: Any) -> Iterator[str]:
    yield from (f"{each} of the host" for each in _HOST if spec.get(each))
    for volume in spec.get("volumes", ()):
        yield from (f"volume {kind}" for kind in volume.keys() - {"name"} - VOLUMES)
    outer = spec.get("securityContext", {})
    if outer.get("sysctls"):
        yield "sysctls"
    for container in _containers(spec):
        inner = container.get("securityContext", {})
        both = outer | inner
        capabilities = inner.get("capabilities", {})
        if inner.get("privileged"):
            yield "privileged"
        if inner.get("allowPrivilegeEscalation") is not False:
            yield "privilege escalation"
        if both.get("runAsNonRoot") is not True:
            yield "may run as root"
        if both.get("runAsUser") == 0:
            yield "runs as root"
        if both.get("seccompProfile", {}).get("type") not in PROFILES:
            yield "no seccomp profile"
        if "ALL" not in capabilities.get("drop", ()):
            yield "keeps capabilities"
        if set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
            yield "adds capabilities"
        if inner.get("procMount", "Default") != "Default":
            yield "procMount"
        if any(port.get("hostPort") for port in container.get("ports", ())):
            yield "host port"


_HOST = ("hostNetwork", "hostPID", "hostIPC")


def _containers(spec: Any) -> Iterator[Any]:
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        yield from spec.get(kind, ())


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_overlay_is_restricted(name: str) -> None:
    assert list(violations(pod(overlay(name)))) == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_namespace_has_it_enforced(name: str) -> None:
    labels = only(overlay(name), "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize("name", OVERLAYS)
def test_what_goes_beyond_it(name: str) -> None:
    spec = pod(overlay(name))
    assert spec["automountServiceAccountToken"] is False
    for container in spec["containers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]


_BREAKS = {
    "volume hostPath": lambda s: s["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
    "may run as root": lambda s: s["securityContext"].pop("runAsNonRoot"),
    "no seccomp profile": lambda s: s["securityContext"].pop("seccompProfile"),
    "keeps capabilities": lambda s: s["containers"][0]["securityContext"].pop("capabilities"),
    "privilege escalation": lambda s: s["containers"][0]["securityContext"].pop(
        "allowPrivilegeEscalation"
    ),
    "hostPID of the host": lambda s: s.update(hostPID=True),
}


@pytest.mark.parametrize("rule", _BREAKS)
def test_the_rules_see_what_breaks_them(rule: str) -> None:
    spec = copy.deepcopy(pod(overlay("cpu")))
    _BREAKS[rule](spec)
    assert rule in list(violations(spec))
