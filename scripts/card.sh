#!/bin/sh
# Tests and measures everything on a GPU machine, or with CARD_MOCK=1 on the emulated GPU: `card.sh correct|speed|extra
# [--pack FILE] [--out FOLDER]`. docs/gpu.md, "The first half hour on a card", describes the output. ZERO_TRAIN_PYTHON
# names another python3.
set -eu
python=${ZERO_TRAIN_PYTHON:-python3}
if [ -n "${CARD_MOCK:-}" ] && ! command -v "$python" >/dev/null; then
    echo "skipped: no $python"
    exit 0
fi
exec "$python" "$(dirname "$0")/card/main.py" "$@"
