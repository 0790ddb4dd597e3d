#!/usr/bin/env bash
# systemd reads the unit of docs/deploy/vm.md without complaint. Its program and user stand in for
# those of the machine that it is for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
sed -e "s,/opt/openrl/bin/openrl,$(command -v true)," -e 's/^User=.*/User=daemon/' docs/deploy/openrl.service >"$dir/openrl.service"
said=$(systemd-analyze verify --man=no "$dir/openrl.service" 2>&1 | grep openrl || true)
[[ -z $said ]] || { echo "$said"; exit 1; }
