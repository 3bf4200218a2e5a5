#!/usr/bin/env bash
# Builds and packs the programs that `card.sh` runs on a GPU machine without Rust: card-pack.sh [--out FILE]
#
# The pack has `zero-train` and the test programs with GPU support, as a stripped release build with kernels for compute
# capability 90 (or CUDA_COMPUTE_CAP). FILE, by default target/card/card.tar.xz, may be at most 50 MB; the programs may
# need glibc 2.36 at most. Without CUDA_HOME, NVIDIA's compiler is installed first (scripts/install-cuda-build.sh).
# Takes half an hour on two cores.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
most_bytes=50000000 newest_glibc=2.36

out=$root/target/card/card.tar.xz
case ${1:-} in
    --out) out=$(realpath -m "${2:?--out FILE}") ;;
    "") ;;
    *) echo "usage: card-pack.sh [--out FILE]" >&2; exit 2 ;;
esac

cd "$root"
[[ -n ${CUDA_HOME:-} ]] || eval "$(scripts/install-cuda-build.sh)"
export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-90}
built=$(python3 scripts/card/programs.py release)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
while IFS=$'\t' read -r name path; do
    strip -o "$work/$name" "$path"
    glibc=$(objdump -T "$work/$name" | grep -o 'GLIBC_[0-9][0-9.]*' | sed 's/GLIBC_//' | sort -V | tail -n 1)
    [[ $(printf '%s\n' "$glibc" "$newest_glibc" | sort -V | tail -n 1) == "$newest_glibc" ]] ||
        { echo "$name asks for glibc $glibc, newer than $newest_glibc" >&2; exit 1; }
    needed=$(objdump -p "$work/$name" | sed -n 's/^ *NEEDED *//p' | tr '\n' ' ')
    printf '%-16s %6.1f MB, %5.1f stripped, glibc %s, needs %s\n' "$name" \
        "$(stat -c %s "$path" | awk '{ print $1 / 1e6 }')" "$(stat -c %s "$work/$name" | awk '{ print $1 / 1e6 }')" "$glibc" "$needed"
done <<<"$built"

mkdir -p "$(dirname "$out")"
# The programs share most of their code, so use a dictionary larger than several of them.
tar -C "$work" -c . | xz --lzma2=preset=9,dict=256MiB >"$out.new"
bytes=$(stat -c %s "$out.new")
printf '%s: %.1f MB\n' "$out" "$(awk "BEGIN { print $bytes / 1e6 }")"
((bytes <= most_bytes)) || { rm "$out.new"; echo "more than $((most_bytes / 1000000)) MB" >&2; exit 1; }
mv "$out.new" "$out"
