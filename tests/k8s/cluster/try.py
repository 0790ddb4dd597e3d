"""Applies the overlays to a real control plane of plain processes, and looks at where pods go.

    tests/k8s/cluster/build.sh DIR      # once; then
    python tests/k8s/cluster/try.py DIR

etcd, the API server, the controllers and the scheduler are real (1.20.2); machines are objects of
the API that nobody runs anything on. What 1.20 doesn't know (policy/v1, custom resources) is left
out and named. Ends with 0 if all holds.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
URL, ETCD, ETCD_PEER, PORT = "https://127.0.0.1:26443", 22379, 22380, 26443
TOKEN = "of-a-cluster-of-one-run"
MACHINES = {
    "l4-a": {"cloud.google.com/gke-accelerator": "nvidia-l4"},
    "l4-spot": {
        "cloud.google.com/gke-accelerator": "nvidia-l4",
        "cloud.google.com/gke-spot": "true",
    },
    "a100-a": {"cloud.google.com/gke-accelerator": "nvidia-tesla-a100"},
    "h100-a": {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"},
    "own-a": {"openrl.dev/node": "true"},
    "own-b": {"openrl.dev/node": "true"},
    "plain": {},
}
EXPECTED = {
    "gke": {"l4-a"},  # not the spot machine, whose taint it does not tolerate
    "gke-spot": {"l4-spot"},
    "gke-a100": {"a100-a"},
    "gke-h100": {"h100-a"},
    "local-disks": {"own-a", "own-b"},
}


def main(built: Path) -> int:
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        stack.enter_context(control_plane(built / "bin", Path(made)))
        for name, labels in MACHINES.items():
            create_machine(name, labels)
        failed = [name for name in EXPECTED if not lands(name)]
        for name in ("single-node", "cpu"):  # nothing provisions their claim: the objects alone
            apply(name)
            print(f"{name}: applied")
            remove(name)
    print("failed: " + ", ".join(failed) if failed else "all as expected")
    return len(failed)


@contextmanager
def control_plane(programs: Path, work: Path) -> Iterator[None]:
    key = work / "service-accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    (work / "tokens").write_text(f"{TOKEN},admin,admin,system:masters\n")
    (work / "config").write_text(json.dumps(_client_configuration()))
    etcd = f"http://127.0.0.1:{ETCD}"
    client = [f"--kubeconfig={work / 'config'}", "--leader-elect=false"]
    account = f"--service-account-private-key-file={key}"
    commands = [
        [
            "etcd",
            f"--data-dir={work / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{ETCD_PEER}",
        ],
        [
            programs / "kube-apiserver",
            f"--etcd-servers={etcd}",
            f"--secure-port={PORT}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--cert-dir={work}",
            f"--token-auth-file={work / 'tokens'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
        ],
        [
            programs / "kube-controller-manager",
            *client,
            account,
            f"--cert-dir={work}",
            "--controllers=*,-nodelifecycle",  # nobody keeps these machines alive
        ],
        [programs / "kube-scheduler", *client],
    ]
    with ExitStack() as stack:
        for command in commands:
            log = stack.enter_context((work / f"{Path(command[0]).name}.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            if "apiserver" in str(command[0]):
                until(lambda: call("get", "--raw", "/readyz").returncode == 0, "API server", 120)
        yield


def lands(overlay: str) -> bool:
    apply(overlay)
    wanted = EXPECTED[overlay]
    try:
        # Above the five minutes after which a controller forgets pods that it waits for in vain: it
        # may do that when an object of the same name has just gone.
        until(lambda: placed() >= wanted, f"{overlay} on {sorted(wanted)}", 360)
    except TimeoutError as error:
        print(error, call("-n", "openrl", "get", "pods", "-o", "yaml").stdout[-3000:])
    found = placed()
    print(f"{overlay}: {sorted(found)}")
    remove(overlay)
    return found == wanted


def placed() -> set[str]:
    """Machines on which the scheduler has put a pod."""
    pods = json.loads(call("-n", "openrl", "get", "pods", "-o", "json").stdout or '{"items": []}')
    return {
        pod["spec"]["nodeName"]
        for pod in pods["items"]
        if pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]
    }


def apply(overlay: str) -> None:
    objects = list(yaml.safe_load_all(rendered(overlay)))
    left_out = [o for o in objects if not known(o)]
    print(f"{overlay}: left out {sorted({o['kind'] for o in left_out})}")
    sent = yaml.safe_dump_all([o for o in objects if known(o)])
    done = call("apply", "--validate=false", "-f", "-", sent=sent)
    if done.returncode:
        raise SystemExit(done.stderr)
    for claim in (o for o in objects if o["kind"] == "PersistentVolumeClaim"):
        bind(claim)


def bind(claim: Any) -> None:
    """Stands in for the storage class of a cloud. Volumes of our own bind by themselves."""
    storage_class = claim["spec"].get("storageClassName")
    if storage_class != "standard-rwx":
        return
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "of-the-cloud", "labels": {"app.kubernetes.io/name": "openrl"}},
        "spec": {
            "storageClassName": storage_class,
            "capacity": claim["spec"]["resources"]["requests"],
            "accessModes": claim["spec"]["accessModes"],
            "claimRef": {"namespace": "openrl", "name": claim["metadata"]["name"]},
            "nfs": {"server": "192.0.2.1", "path": "/homes"},
        },
    }
    call("apply", "-f", "-", sent=json.dumps(volume))


def remove(overlay: str) -> None:
    """Pods too: there is no kubelet to let them go."""
    call("-n", "openrl", "delete", "daemonset", "openrl", "--wait=false")
    call("-n", "openrl", "delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false")
    call("-n", "openrl", "patch", "pvc", "openrl-homes", "--type=merge", "-p", _NO_FINALIZERS)
    call("-n", "openrl", "delete", "pvc", "openrl-homes", "--wait=false")
    for volume in ("openrl-homes", "of-the-cloud"):
        call("delete", "pv", volume, "--wait=false")
        call("patch", "pv", volume, "--type=merge", "-p", _NO_FINALIZERS)
    until(lambda: not placed() and not names("pvc") and not names("pv"), f"{overlay} gone", 60)


_NO_FINALIZERS = '{"metadata": {"finalizers": null}}'


def names(kind: str) -> str:
    return call("get", kind, "-A", "-o", "name").stdout.strip()


def known(one: Any) -> bool:
    group = one["apiVersion"]
    return group in ("v1", "apps/v1", "networking.k8s.io/v1", "rbac.authorization.k8s.io/v1")


def create_machine(name: str, labels: dict[str, str]) -> None:
    gpu = "cloud.google.com/gke-accelerator" in labels or "openrl.dev/node" in labels
    taints = [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}] if gpu else []
    if "cloud.google.com/gke-spot" in labels:
        taints.append({"key": "cloud.google.com/gke-spot", "value": "true", "effect": "NoSchedule"})
    room = {"cpu": "26", "memory": "234Gi", "ephemeral-storage": "500Gi", "pods": "110"}
    machine = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
        "spec": {"taints": taints},
    }
    done = call("create", "-f", "-", sent=json.dumps(machine))
    if done.returncode:
        raise SystemExit(done.stderr)
    has = {**room, "nvidia.com/gpu": "1"} if gpu else room
    conditions = [{"type": "Ready", "status": "True", "reason": "Fake"}]
    status = {"status": {"capacity": has, "allocatable": has, "conditions": conditions}}
    put = {**json.loads(call("get", "node", name, "-o", "json").stdout), **status}
    put["spec"]["taints"] = taints  # without "not-ready", which admission added
    call("replace", "-f", "-", sent=json.dumps(put))
    call("replace", "--raw", f"/api/v1/nodes/{name}/status", "-f", "-", sent=_fresh(name, status))


def _fresh(name: str, status: dict[str, Any]) -> str:
    now = json.loads(call("get", "node", name, "-o", "json").stdout)
    return json.dumps({**now, **status})


def rendered(overlay: str) -> str:
    path = ROOT / "k8s" / "overlays" / overlay
    return subprocess.run(
        ["kubectl", "kustomize", path], check=True, capture_output=True, text=True
    ).stdout


def call(*arguments: str, sent: str | None = None) -> subprocess.CompletedProcess[str]:
    to = ["--server", URL, "--insecure-skip-tls-verify", "--token", TOKEN]
    return subprocess.run(
        ["kubectl", *to, *arguments], input=sent, capture_output=True, text=True, check=False
    )


def _client_configuration() -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": URL, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "u", "user": {"token": TOKEN}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }


def until(holds: Callable[[], bool], what: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(1)


if __name__ == "__main__":
    if not shutil.which("etcd"):
        raise SystemExit("needs etcd: apt-get install etcd-server")
    sys.exit(main(Path(sys.argv[1])))
