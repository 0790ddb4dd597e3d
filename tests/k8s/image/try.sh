#!/usr/bin/env bash
# Runs the entry point of the image that build.sh made as the `cpu` overlay's pod does: its user,
# no capabilities, a read-only root, the ConfigMap's file, a list of keys, the pod's arguments.
# Asks the probes, then ends it by SIGTERM. Needs root, kubectl, and Python with PyYAML.
#   tests/k8s/image/try.sh DIR
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
dir=$(realpath "${1:?where build.sh built}")
work=$dir/pod
rm -rf "$work" && mkdir -p "$work/config" "$work/keys"
kubectl kustomize k8s/overlays/cpu >"$work/pod.yaml"
${PYTHON:-python3} - "$work" "$dir/config.json" <<'PYTHON'
import json, pathlib, shlex, sys, yaml
work, image = pathlib.Path(sys.argv[1]), json.loads(pathlib.Path(sys.argv[2]).read_text())["OCIv1"]["config"]
objects = {o["kind"]: o for o in yaml.safe_load_all((work / "pod.yaml").read_text())}
spec = objects["DaemonSet"]["spec"]["template"]["spec"]
assert image["User"] == f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}", image
(work / "config" / "openrl.toml").write_text(objects["ConfigMap"]["data"]["openrl.toml"])
variables = dict(v.split("=", 1) for v in image["Env"])
variables |= {e["name"]: e["value"] for e in spec["containers"][0]["env"] if "value" in e}
arguments = [a.replace("$(NODE_NAME)", "machine-1") for a in spec["containers"][0]["args"]]
command = ["env", "-i", *(f"{k}={v}" for k, v in variables.items()), *image["Entrypoint"], *arguments]
(work / "command").write_text(shlex.join(command))
PYTHON
export root=$dir/rootfs work

inside() {
    mount --make-rprivate /
    mount --bind "$root" "$root"
    for path in homes etc/openrl etc/openrl-keys; do mkdir -p "$root/$path"; done
    mount -o remount,bind,ro "$root"
    mount -t tmpfs -o mode=1777 tmp "$root/tmp"
    mount -t tmpfs -o mode=2770,gid=10001 homes "$root/homes"
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
    mount --bind "$work/config" "$root/etc/openrl"
    as=(setpriv --reuid 10001 --regid 10001 --clear-groups --bounding-set=-all --inh-caps=-all --no-new-privs)
    enter() { (cd "$root" && exec chroot . "${as[@]}" "$@"); }
    mount -t tmpfs -o mode=2770,gid=10001 keys "$root/etc/openrl-keys"
    enter env PATH=/opt/openrl/bin:/usr/bin:/bin OPENRL_AUTH__KEYS_FILE=/etc/openrl-keys/keys openrl keys add --owner alice >/dev/null
    mount -o remount,ro "$root/etc/openrl-keys"
    enter sh -c 'id -u; touch /here 2>/dev/null && echo "the root is writable" && exit 1; grep CapEff /proc/self/status'
    local -a chroot_command
    eval "chroot_command=($(cat "$work/command"))"
    (cd "$root" && exec chroot . "${as[@]}" "${chroot_command[@]}") >"$work/log" 2>&1 &
    server=$!
    for _ in $(seq 120); do
        sleep 1
        kill -0 $server || { cat "$work/log"; exit 1; }
        curl -fsS -m 5 http://127.0.0.1:8000/api/v1/readyz 2>/dev/null | grep '"ready"' && break
    done
    curl -fsS -m 5 http://127.0.0.1:8000/api/v1/healthz && echo
    kill -TERM $server
    wait $server && echo "ended by SIGTERM with 0" && ls "$root/homes/machine-1"
}
export -f inside
unshare --mount --pid --net --fork bash -euo pipefail -c 'ip link set lo up 2>/dev/null || true; inside'
