#!/usr/bin/env bash
# Makes .venv with all that demo, tests and benches need. Does nothing when it is already so.
# usage: setup.sh PYTHON VENV
#
# VENV/.cbrs-setup holds the hash of the interpreter and the requirements it was made for, so that
# a changed requirement is installed and an unchanged one costs nothing.
set -euo pipefail

python="$1"
venv="$2"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
stamp="$venv/.cbrs-setup"

# Version, build and place of an interpreter, links resolved: an environment and the interpreter that
# made it are the same, and an environment outlives a moved link.
identity() { "$1" -c 'import os, sys; print(sys.version, os.path.realpath(sys.executable))'; }

wanted() {
    { identity "$python" && "$python" "$here/requirements.py" && cat "${BASH_SOURCE[0]}"; } | sha256sum | cut -d ' ' -f 1
}

if [[ -x "$venv/bin/python" && -f "$stamp" ]] && command -v "$python" >/dev/null &&
    "$python" -c 'import tomllib' 2>/dev/null && [[ "$(cat "$stamp")" == "$(wanted)" ]]; then
    exit 0
fi

"$here/check_prerequisites.sh" "$python"
key="$(wanted)"
if [[ ! -x "$venv/bin/python" || "$(identity "$venv/bin/python")" != "$(identity "$python")" ]]; then
    [[ ! -e "$venv" ]] || echo "set-up: $venv was made by another interpreter, and is made anew"
    "$python" -m venv --clear "$venv"
fi
if ! "$venv/bin/python" "$here/link_torch.py" --check >/dev/null; then
    if shared="$("$python" "$here/link_torch.py" --into "$venv")"; then
        echo "set-up: using $shared"
    fi
fi
"$python" "$here/requirements.py" >"$venv/requirements.txt"
"$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off -r "$venv/requirements.txt"
echo "$key" >"$stamp"
