#!/usr/bin/env bash
# Runs make targets as stages: times each, keeps its log, and ends with a table of all of them.
# usage: stages.sh GROUP...    GROUP = TARGET or TARGET+TARGET, side by side: for those that leave a core idle
# (exit 1 if any failed; a failed set-up or build ends the run)
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
logs=target/stages
rm -rf "$logs"
mkdir -p "$logs"

table=()
failed=()
started=$SECONDS

# Runs one target, its lines behind a mark, and notes its exit status and seconds.
run() {
    local stage="$1" mark="$2" begin=$SECONDS status
    "${MAKE:-make}" --no-print-directory "$stage" 2>&1 | tee "$logs/$stage.log" | sed -u "s/^/$mark/"
    status=${PIPESTATUS[0]}
    echo "$status $((SECONDS - begin))" >"$logs/$stage.status"
}

for group in "$@"; do
    echo "=== ${group//+/ and }"
    IFS=+ read -ra stages <<<"$group"
    if ((${#stages[@]} == 1)); then
        run "$group" ""
    else
        # As jobs they keep the signals that a shell has its background ignore; an interruption is passed on.
        set -m
        trap 'for job in $(jobs -p); do kill -- "-$job"; done; wait; exit 130' INT TERM
        for stage in "${stages[@]}"; do run "$stage" "[$stage] " </dev/null & done
        wait
        trap - INT TERM
        set +m
    fi
    for stage in "${stages[@]}"; do
        read -r status took <"$logs/$stage.status"
        if ((status == 0)); then
            table+=("$(printf '%-14s ok      %5d s' "$stage" "$took")")
        else
            table+=("$(printf '%-14s FAILED  %5d s' "$stage" "$took")")
            failed+=("$stage")
        fi
        if ((status != 0)) && [[ "$stage" == setup || "$stage" == build ]]; then
            break 2
        fi
    done
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
