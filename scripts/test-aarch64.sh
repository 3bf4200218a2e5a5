#!/usr/bin/env bash
# Runs the tests of zero-optim, zero-comm, zero-ops and zero-model for aarch64 on another kind of machine:
# scripts/test-aarch64.sh [FILTER]
#
# qemu-user emulates the processor and passes system calls to this machine's kernel. The Rust target, qemu and a C cross
# compiler are installed if missing, from Debian's packages as root or with sudo. FILTER is passed to `cargo test`.
# Tests that do not run under qemu are named below with the reason, and printed as skipped.
#
# This tests what depends on the instruction set, above all the bits of results. On an x86-64 host it does not test
# memory ordering: emulated threads have the host's memory order, which is stronger.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0

target=aarch64-unknown-linux-gnu
missing=()
command -v qemu-aarch64 >/dev/null || missing+=(qemu-user)
command -v aarch64-linux-gnu-gcc >/dev/null || missing+=(gcc-aarch64-linux-gnu)
[[ -e /usr/aarch64-linux-gnu/include/stdio.h ]] || missing+=(libc6-dev-arm64-cross)
if [[ ${#missing[@]} -gt 0 ]]; then
    root=$([[ $(id -u) == 0 ]] || echo sudo)
    $root apt-get update --quiet
    $root apt-get install --yes --no-install-recommends "${missing[@]}"
fi
rustup target list --installed | grep -qx $target || rustup target add $target

emulator="qemu-aarch64 -L /usr/aarch64-linux-gnu"
runner=$(mktemp)
trap 'rm -f "$runner"' EXIT
cat >"$runner" <<END
#!/bin/sh
case \$1 in
*/conformance_in_place-*)
    echo "skipped: conformance_in_place: every rank maps as much as this machine has for each other rank, of each page of which qemu keeps a record"
    exit 0
    ;;
esac
exec $emulator "\$@"
END
chmod +x "$runner"
echo "skipped: kernels of a GPU, where the tests say that there is no C++ compiler: their emulator has not been brought to aarch64"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=$runner
export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc
# For programs that the tests compile and start themselves.
export CXX=none ZERO_COMM_TEST_RUNNER=$emulator

cargo test --no-fail-fast --target $target -p zero-optim -p zero-comm -p zero-ops -p zero-model --lib --bins --tests -- "$@"
