#!/usr/bin/env bash
# What a lent GPU measures first, in 12 minutes at most, as one JSON file:
#
#     experiments/gpu_session.sh OUT              # on the GPU: OUT/session.json
#     SMALL=1 experiments/gpu_session.sh OUT      # tiny sizes, on any machine: does it work?
#
# bench_gpu.py takes 8 minutes: ceilings, the kernels of FPPL's round, torch's loop beside it, evaluation, training of
# a whole network in bfloat16, TF32 and float32, attention's three ways, a round with cuDNN's, GELU's two ways, compile
# times, pfl-research's benchmark on CIFAR-10. What is left goes to a paper's row at full size, if its data and weights are
# here; OUT/row is resumed by the next session.
#
#   PYTHON   the interpreter; default python3
#   SERIES   series of bench_gpu.py, separated by commas; default those above
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?folder for session.json}
python=${PYTHON:-python3}
series=${SERIES:-ceilings,profile,torch,evaluation,whole network,attention,cudnn,gelu,compilation,pfl-cifar10}
minutes=8
row_minutes=2.5
scale=paper
small=()
if [ -n "${SMALL:-}" ]; then
  minutes=3
  row_minutes=0.5
  scale=mini
  small=(--small)
fi
export PYTHONPATH=$PWD
mkdir -p "$out"
started=$(date +%s)
IFS=, read -ra only <<< "$series"
"$python" experiments/bench_gpu.py --minutes "$minutes" "${small[@]}" --only "${only[@]}" --out "$out/lines.jsonl" \
  > "$out/bench.log" 2>&1
bench=$?
timeout 200 "$python" experiments/full_size.py --out "$out/row" --minutes "$row_minutes" --grace 20 --scale "$scale" \
  fppl table1 --row fppl > "$out/row.log" 2>&1
row=$?
"$python" - "$out" "$bench" "$row" "$started" <<'END'
import json, pathlib, sys, time

out, bench, row, started = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:])
lines = out / "lines.jsonl"
found = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
session = {
    "lines": found,
    "bench_exit": bench,
    "row_exit": row,
    "row_said": (out / "row.log").read_text().splitlines()[-3:],
    "seconds": time.time() - started,
}
(out / "session.json").write_text(json.dumps(session, indent=1))
END
echo "$out/session.json"
