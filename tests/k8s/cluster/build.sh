#!/usr/bin/env bash
# Builds a Kubernetes control plane (1.20.2, as Debian's source package has it) into DIR/bin.
# About ten minutes of CPU time, once. Needs Debian 12 with golang-1.19-go and etcd-server.
#   tests/k8s/cluster/build.sh DIR
set -euo pipefail
dir=$(realpath -m "${1:?where to build}")
mkdir -p "$dir/lists/partial" "$dir/source" "$dir/bin"
cd "$dir"

if ! ls source/*.orig.tar.gz >/dev/null 2>&1; then
    echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main" >sources.list
    options=(-o "Dir::Etc::sourcelist=$dir/sources.list" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::lists=$dir/lists")
    apt-get "${options[@]}" update -q
    (cd source && apt-get "${options[@]}" source -q --download-only kubernetes)
fi
tree=$dir/go/src/k8s.io/kubernetes
if [[ ! -d $tree ]]; then
    mkdir -p "$tree"
    tar -xzf source/*.orig.tar.gz --strip-components=1 -C "$tree"
fi

export GOPATH=$dir/go GO111MODULE=off GOCACHE=$dir/cache GOFLAGS=-p=2 PATH=/usr/lib/go-1.19/bin:$PATH
cd "$tree"
generated=pkg/generated/openapi/zz_generated.openapi.go
if [[ ! -f $generated ]]; then
    go build -o "$dir/bin/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
    mapfile -t packages < <(grep -rlE --include=*.go '^// *\+k8s:openapi-gen=' pkg staging/src/k8s.io vendor/k8s.io 2>/dev/null |
        xargs -n1 dirname | sed 's,^staging/src/,,; s,^vendor/,,; s,^pkg/,k8s.io/kubernetes/pkg/,' | sort -u | grep -v -e /testdata -e sample-apiserver -e code-generator)
    list=$(printf '%s\n' "${packages[@]}" | sed 's,^k8s.io/\(api\|apimachinery\|apiserver\|kube-aggregator\|apiextensions-apiserver\|client-go\|component-base\|controller-manager\|cloud-provider\|kube-controller-manager\|kube-proxy\|kube-scheduler\|kubelet\|metrics\|legacy-cloud-providers\)\b,k8s.io/kubernetes/vendor/&,' | paste -sd,)
    "$dir/bin/openapi-gen" -O zz_generated.openapi -p k8s.io/kubernetes/pkg/generated/openapi \
        -h hack/boilerplate/boilerplate.generatego.txt -i "$list" -r "$dir/violations" --output-base "$dir/go/src"
fi
for command in kube-apiserver kube-scheduler kube-controller-manager; do
    [[ -x $dir/bin/$command ]] || go build -o "$dir/bin/$command" "k8s.io/kubernetes/cmd/$command"
done
ls "$dir/bin"
