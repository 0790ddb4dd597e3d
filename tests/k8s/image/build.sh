#!/usr/bin/env bash
# Builds the Dockerfile's `cpu` target without a Docker engine: buildah with chroot isolation, on a
# Debian root in the place of the python image. Needs root, and Debian's buildah and debootstrap.
#   tests/k8s/image/build.sh DIR [PATH...]
# Leaves the image's root file system in DIR/rootfs, and its configuration in DIR/config.json.
# PATHs, say /etc/pip.conf, are there during the build; TORCH_INDEX names another index for torch.
set -euo pipefail
checkout=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../../..")
dir=$(realpath -m "${1:?where to build}")
shift
mkdir -p "$dir"
tool=(buildah --storage-driver vfs --root "$dir/containers" --runroot "$dir/run")
export BUILDAH_ISOLATION=chroot

if ! "${tool[@]}" inspect --type image localhost/python >/dev/null 2>&1; then
    [[ -d $dir/debian/usr ]] || debootstrap --variant=minbase --include=python3,python3-venv,python-is-python3,ca-certificates bookworm "$dir/debian"
    base=$("${tool[@]}" from scratch)
    "${tool[@]}" add -q "$base" "$dir/debian" /
    "${tool[@]}" commit -q "$base" localhost/python
    "${tool[@]}" rm "$base" >/dev/null
fi

index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
mounts=()
for path in "$@"; do
    mounts+=(-v "$path:$path:ro")
done
"${tool[@]}" build -q --target cpu --build-arg PYTHON=localhost/python --build-arg "CPU_INDEX=$index" \
    "${mounts[@]}" -t localhost/openrl:cpu "$checkout"
made=$("${tool[@]}" from localhost/openrl:cpu)
rm -rf "$dir/rootfs"
cp -a "$("${tool[@]}" mount "$made")" "$dir/rootfs"
"${tool[@]}" inspect --type image localhost/openrl:cpu >"$dir/config.json"
"${tool[@]}" rm "$made" >/dev/null
du -sh "$dir/rootfs"
