#!/usr/bin/env bash
# Runs make targets as stages: times each, keeps its log, and ends with a table of all of them.
# usage: stages.sh TARGET...    (exit 1 if any failed; a failed set-up or build ends the run)
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
logs=target/stages
rm -rf "$logs"
mkdir -p "$logs"

table=()
failed=()
started=$SECONDS
for stage in "$@"; do
    echo "=== $stage"
    begin=$SECONDS
    "${MAKE:-make}" --no-print-directory "$stage" 2>&1 | tee "$logs/$stage.log"
    status=${PIPESTATUS[0]}
    took=$((SECONDS - begin))
    if ((status == 0)); then
        table+=("$(printf '%-14s ok      %5d s' "$stage" "$took")")
    else
        table+=("$(printf '%-14s FAILED  %5d s' "$stage" "$took")")
        failed+=("$stage")
    fi
    if ((status != 0)) && [[ "$stage" == setup || "$stage" == build ]]; then
        break
    fi
done

# The test runners' own closing lines once more, without the ones that ran nothing.
echo
grep -hE '^test result: |^=+ .*(passed|failed|error).* in [0-9.]+s' "$logs"/*.log | grep -v ' 0 passed; 0 failed' || true
echo
printf '%s\n' "${table[@]}"
printf '%-14s %-7s %5d s\n' all "$([[ ${#failed[@]} -eq 0 ]] && echo ok || echo FAILED)" $((SECONDS - started))
if ((${#failed[@]})); then
    echo "failed: ${failed[*]} (logs: $logs/)" >&2
    exit 1
fi
