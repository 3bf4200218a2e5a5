#!/bin/sh
# Installs the browser that planner/tests/library/report_page.rs and cli/tests/e2e/commands/report.rs open pages with:
# scripts/install-browser.sh
#
# Uses Debian's package if available (as root, or with sudo); otherwise Playwright's headless shell from npm. In that
# case set ZERO_TRAIN_BROWSER to the program printed last. Does not install Node, which the test needs.
set -eu

root=$([ "$(id -u)" = 0 ] || echo sudo)
if command -v apt-get >/dev/null && $root apt-get update --quiet && $root apt-get install --yes --no-install-recommends chromium fonts-dejavu-core
then
    chromium --version
else
    npx --yes playwright install chromium-headless-shell
    for cache in "${PLAYWRIGHT_BROWSERS_PATH:-}" ~/.cache/ms-playwright ~/Library/Caches/ms-playwright; do
        [ ! -d "$cache" ] || find "$cache" -type f \( -name headless_shell -o -name chrome-headless-shell \)
    done
fi
