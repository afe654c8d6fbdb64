#!/usr/bin/env bash
# Says what is missing before anything is downloaded or built, and how much the downloads will be.
# usage: check_prerequisites.sh PYTHON    (exit 1: something is missing, each thing on a line)
set -euo pipefail

python="$1"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
problems=()

# at_least HAVE WANT: are the dotted numbers HAVE >= WANT?
at_least() { [[ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" == "$2" ]]; }

check_system() {
    local machine
    machine="$(uname -m)"
    [[ "$(uname -s)" == Linux && ("$machine" == x86_64 || "$machine" == aarch64) ]] ||
        problems+=("Linux on x86-64 or aarch64 (this is $(uname -s) on $machine)")
}

check_python() {
    if ! command -v "$python" >/dev/null; then
        problems+=("Python 3.11 or newer: '$python' is not a command (name another: make PYTHON=python3.12 ...)")
        return
    fi
    local version
    version="$("$python" -c 'import platform; print(platform.python_version())' 2>/dev/null)" || version=unknown
    if [[ "$version" == unknown ]] || ! at_least "$version" 3.11; then
        problems+=("Python 3.11 or newer: '$python' is version $version (name another: make PYTHON=python3.12 ...)")
        return
    fi
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        problems+=("the Python modules venv and ensurepip for '$python' (Debian, Ubuntu: apt-get install python3-venv)")
}

check_rust() {
    local wanted found tool
    wanted="$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$root/Cargo.toml" "$root"/rust/*/Cargo.toml | sort -V | tail -n 1)"
    for tool in cargo rustc; do
        if ! command -v "$tool" >/dev/null; then
            problems+=("$tool $wanted or newer (a Rust toolchain, for example from rustup)")
            continue
        fi
        found="$("$tool" --version | awk '{print $2}')"
        at_least "${found%%-*}" "$wanted" || problems+=("$tool $wanted or newer: this is $found (rustup update)")
    done
}

check_linker() {
    if ! command -v cc >/dev/null; then
        problems+=("a C compiler and linker under the name cc (Debian, Ubuntu: apt-get install gcc libc6-dev)")
    elif ! echo 'int main(void) { return 0; }' | cc -x c - -o /dev/null 2>/dev/null; then
        problems+=("a working C linker: cc cannot link an empty program (Debian, Ubuntu: apt-get install libc6-dev)")
    fi
    command -v make >/dev/null || problems+=("make")
}

# Sizes are those of the files on the package index, rounded up; nothing else is fetched.
announce_downloads() {
    local torch="PyTorch with its libraries (up to 3 GB, 6 GB unpacked)"
    if "$python" "$root/scripts/link_torch.py" --check >/dev/null 2>&1; then
        torch="no PyTorch ('$python' has one, which is used)"
    fi
    echo "set-up: .venv is made in this folder; to be downloaded, once: $torch," \
        "other Python packages (220 MB), Rust crates (30 MB), the small model (100 MB)"
}

check_disk() {
    local free_gib
    free_gib="$(($(df -Pk "$root" | awk 'NR == 2 {print $4}') / 1024 / 1024))"
    ((free_gib >= 4)) || problems+=("4 GB of free disk space at $root (10 GB where PyTorch is downloaded): $free_gib GB are free")
}

check_system
check_python
check_rust
check_linker
check_disk
if ((${#problems[@]})); then
    echo "set-up cannot start; missing:" >&2
    printf '  - %s\n' "${problems[@]}" >&2
    exit 1
fi
announce_downloads
