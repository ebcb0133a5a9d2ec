# shellcheck shell=bash
# What gpu_check and test-gpu share: parts of a check, each run in a shell of its own with a time
# limit and recorded as a small JSON verdict (gpu_parts.py). Sourced in the repository's root.
#
# A script adds its parts to `limit_s` and `groups`, a function for each part, and names them in
# `required` or `optional`. Options are taken by `take_option`; then it calls `run_parts`.

python=${PYTHON:-.venv/bin/python}
if ! command -v "$python" >/dev/null; then python=python3; fi
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}

script=$(basename "$0")
out=${OUT:-gpu_results}
only=
tests=
matching=
required=(build tests_gemm tests_engine tests_server)
optional=(tests_selected)
# Variables of a script that its parts use.
exported=()
declare -A limit_s=(
    [build]=420 [tests_gemm]=570 [tests_engine]=570 [tests_server]=570 [tests_selected]=570
)
declare -A groups=([tests]="tests_gemm tests_engine tests_server")

# Rows with penalties or biases are drawn on CPUs, by their kernels.
build() { "$python" -m c2cserve.kernels.build && "$python" -m c2cserve.cli.main kernels build; }

# GPU tests as pytest's arguments say, of names that fit -k.
gpu_pytest() {
    "$python" -m pytest -p no:cacheprovider -m gpu --junitxml "$junit" \
        ${matching:+-k "$matching"} "$@"
}
tests_gemm() {
    gpu_pytest tests/gpu/test_{gemm,gated,grouped,every_variant,every_triton_kernel,hbm_cache}.py
}
tests_engine() {
    gpu_pytest tests/gpu/test_{decode_attention,decode_graphs,flash_prefill,gpu_engine}.py \
        tests/gpu/test_{attach,gpu_arriving,gpu_overlap,gpu_prefix_tier,gpu_rotation,gpu_rotation_live,hybrid_slices,pool_home,small_copies,transfers,two_lanes}.py
}
tests_server() {
    gpu_pytest tests/gpu/test_{gpu_faults,gpu_guides,gpu_isolation,multipath,neighbour_relays,peer_homes,profile_bench,weight_loads}.py
}
tests_selected() {
    # shellcheck disable=SC2086  # files in one string
    gpu_pytest ${tests:-tests/gpu}
}

fail_usage() {
    echo "$script: $1" >&2
    exit 2
}

# Take one of the common options from "$@". `taken` is how many words it was; 0: it is another one.
# shellcheck disable=SC2034  # scripts read it
take_option() {
    taken=2
    case $1 in
        --only) only=${2:?--only needs parts} ;;
        --out) out=${2:?--out needs a folder} ;;
        --tests) tests=${2:?--tests needs files} ;;
        -k) matching=${2:?-k needs an expression} ;;
        --list)
            printf '%s\n' "${required[@]}"
            exit 0 ;;
        -h | --help)
            sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"
            print_parts
            exit 0 ;;
        *) taken=0 ;;
    esac
}

print_parts() {
    local name
    echo
    echo "Parts, and the seconds each may take:"
    for name in "${required[@]}" "${optional[@]}"; do printf '  %-16s %4d\n' "$name" "${limit_s[$name]}"; done
    echo "Groups:"
    for name in "${!groups[@]}"; do printf '  %-16s %s\n' "$name" "${groups[$name]}"; done | sort
}

# Fill `parts` with what --only says, all required ones by default.
choose_parts() {
    local name names members
    parts=()
    if [[ -z $only ]]; then
        if [[ -n $tests$matching ]]; then fail_usage "--tests and -k need --only"; fi
        parts=("${required[@]}")
        return
    fi
    IFS=, read -ra names <<<"$only"
    for name in "${names[@]}"; do
        if [[ $name == tests && -n $tests$matching ]]; then
            parts+=(tests_selected)
        elif [[ -v groups[$name] ]]; then
            read -ra members <<<"${groups[$name]}"
            parts+=("${members[@]}")
        elif [[ -v limit_s[$name] ]]; then
            parts+=("$name")
        else
            fail_usage "no part called '$name' (--help lists them)"
        fi
    done
}

# What a part was narrowed to: it does not count as the whole part then.
selection_of() {
    case $1 in
        tests_selected) echo "${tests:-tests/gpu}${matching:+ -k $matching}" ;;
        tests_* | memcheck_* | synccheck_* | racecheck_*) echo "${matching:+-k $matching}" ;;
    esac
}

# Run `parts`, one after the other.
run_parts() {
    local part began code log failed=() scratch shell_state
    mkdir -p "$out"
    log=$out/$script.log
    scratch=$(mktemp -d)
    # shellcheck disable=SC2064  # its name now
    trap "rm -rf '$scratch'" EXIT
    : >"$log"
    # `timeout` runs programs: functions go to a shell of their own, with what they use.
    export -f gpu_pytest "${parts[@]}"
    for part in "${parts[@]}"; do
        echo "== $part" | tee -a "$log"
        junit=$scratch/$part.xml
        shell_state=$(declare -p python out junit tests matching "${exported[@]}")
        began=$SECONDS
        # What is told to end still removes what it made, and pytest writes its report.
        timeout --signal=INT --kill-after=25 "${limit_s[$part]}" \
            bash -uo pipefail -c "$shell_state; $part" 2>&1 | tee -a "$log"
        code=${PIPESTATUS[0]}
        python3 scripts/gpu_parts.py record --part "$part" --exit "$code" \
            --seconds $((SECONDS - began)) --junit "$junit" \
            --selection "$(selection_of "$part")" --out "$out"
        if ((code)); then failed+=("$part"); fi
        echo "== $part: exit $code after $((SECONDS - began)) s" | tee -a "$log"
    done
    if ((${#failed[@]})); then
        echo "$script: failed: ${failed[*]} (see $log)" >&2
        exit 1
    fi
    echo "$script: all passed"
}
