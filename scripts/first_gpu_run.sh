#!/usr/bin/env bash
# From a fresh clone to a trained agent on one GPU, in under an hour; ends with a file that tells how it went.
#
#   bash scripts/first_gpu_run.sh [flags of `trl-stppo train`]
#
# VENV is made where it is missing (.venv-gpu), FOLDER takes the results (runs/first_gpu_run).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv-gpu} folder=${FOLDER:-runs/first_gpu_run}

if [ ! -x "$venv/bin/trl-stppo" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet -e '.[search,plot]'
fi
mkdir -p "$folder"
# A measurement that fails is in the report, and no reason not to train.
"$venv/bin/python" benchmarks/gpu.py ${GPU_CHECK:-} | tee "$folder/gpu.txt" || true
"$venv/bin/trl-stppo" train --config scripts/configs/first_gpu_run.yaml --output_dir "$folder/agent" "$@"

"$venv/bin/python" - "$folder" <<'PYTHON'
import json, pathlib, sys

folder = pathlib.Path(sys.argv[1])
lines = (folder / "agent" / "metrics.jsonl").read_text().splitlines()
steps = [step for step in map(json.loads, lines) if "loss" in step]
report = {
    "gpu": json.loads((folder / "gpu.txt").read_text().splitlines()[-1]),
    "evaluation": json.loads((folder / "agent" / "evaluation.json").read_text()),
    "last_steps": steps[-3:],
}
(folder / "report.json").write_text(json.dumps(report))
print(f"Please attach {folder / 'report.json'} to an issue: it names versions and the GPU, no paths and no texts.")
PYTHON
