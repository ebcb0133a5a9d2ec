#!/usr/bin/env bash
# Bytes that hardware counters see in one launch of sym, asym and direct, against the bytes that
# the dataflows' formulas count.
#
#   benchmarks/gemm_counters.sh [DIR]      writes DIR/gemm_counters.json (default: gpu_results)
#
# Needs Nsight Compute (ncu) and the right to read counters (root, or the driver's
# NVreg_RestrictProfilingToAdminUsers=0). Of the metrics below it asks for those this GPU has.
set -euo pipefail
out=$(realpath -m "${1:-gpu_results}")
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
if ! command -v "$python" >/dev/null; then python=python3; fi
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out"

if ! command -v ncu >/dev/null; then
    echo "gemm_counters: no ncu on PATH: install Nsight Compute" >&2
    exit 1
fi
wanted=(
    nvlrx__bytes pcie__read_bytes
    lts__t_sectors_aperture_peer lts__t_sectors_aperture_sysmem lts__t_sectors_aperture_device
    dram__bytes_read dram__bytes_write
)
known=$(ncu --query-metrics --devices 0)
metrics=()
for metric in "${wanted[@]}"; do
    if grep -q "^$metric " <<<"$known"; then
        metrics+=("$metric.sum")
    else
        echo "gemm_counters: this GPU or ncu has no $metric" >&2
    fi
done

homes=(host)
if "$python" -c 'import sys, torch; sys.exit(torch.cuda.device_count() < 2)'; then
    homes+=(peer)
fi
logs=()
for home in "${homes[@]}"; do
    for dataflow in sym asym direct; do
        log=$out/counters_${home}_$dataflow.csv
        # The program marks the launch to be looked at. Clocks stay as they are on this machine.
        ncu --csv --print-units base --clock-control none --profile-from-start off \
            --metrics "$(IFS=,; echo "${metrics[*]}")" --log-file "$log" \
            "$python" benchmarks/gemm_counters.py launch "$dataflow" --home "$home"
        logs+=("$home:$dataflow:$log")
    done
done
"$python" benchmarks/gemm_counters.py compare "${logs[@]}" --out "$out/gemm_counters.json"
rm -f "$out"/counters_*.csv
