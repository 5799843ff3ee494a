"""Records one update of TRL 1.12's own ``PPOTrainer`` as a test fixture.

Why: TRL removed ``PPOTrainer`` in 1.13. To check that this package computes the same PPO on today's
TRL, the last trainer that shipped is run for real, on CPU, with tiny random models, and its
intermediate numbers are kept. Nothing upstream is edited: the numbers are read from the local
variables of ``PPOTrainer.train`` through an optimizer hook and a trainer callback.

How to run (writes the fixture and, beside it, a JSON file with the settings)::

    python scripts/oracle/make_oracle.py --venv /path/to/scratch-venv

The scratch environment is created and filled by pip unless the folder exists; the script then
runs itself inside it. Point ``PIP_EXTRA_INDEX_URL`` at PyTorch's CPU builds to get a small torch.

Two runs are recorded from the same initial weights, ``one_epoch`` (one optimizer step) and
``two_epochs`` (two steps on the same rollout; a large part of the tokens is clipped in the second
one). One mini-batch holds all B episodes, no response contains EOS or padding, and the update is
not the last of a dataloader pass. Keys, where ``<run>`` is the name of the run, P the padded
prompt length, T the response length and M one of policy, ref, value, reward:

* ``init/<M>/<parameter>``: initial weights, float32 (the runs cast them to float64, exactly).
* ``<run>/query_ids`` (B, P) left-padded, ``query_mask`` (B, P), ``response_ids`` (B, T).
* ``<run>/logprobs``, ``ref_logprobs``, ``kl``, ``non_score_reward``, ``rewards``, ``returns``,
  ``advantages_raw`` (before whitening), ``advantages``: all (B, T), entry t belongs to response
  token t. ``logprobs`` are those of the sampler, float32.
* ``<run>/values`` (B, T): value of the state before token t, read at position P - 1 + t.
* ``<run>/scores`` (B,): reward model's score at the last response token.
* ``<run>/step<n>/``: of the n-th optimizer step (from 1). ``indices`` (B,) is the row order of
  the mini-batch, in which ``new_logprobs``, ``ratio`` and ``vpred`` (B, T) are stored; scalars
  ``pg_loss``, ``vf_loss``, ``loss``, ``vf_clipfrac``, ``pg_clipfrac``; ``grad/<M>/<parameter>`` and
  ``after/<M>/<parameter>``, the gradient used and the weights afterwards (policy and value).
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DEFAULT_OUTPUT = REPOSITORY / "tests" / "fixtures" / "ppo_oracle.safetensors"
# `requests` is needed by TRL 1.12 but not declared by it.
REQUIREMENTS = ("trl==1.12.0", "transformers==5.23.0", "torch==2.13.0", "requests")


def _enter(venv: Path) -> None:
    """Creates the scratch environment unless it exists and runs this script inside it."""
    python = venv / "bin" / "python"
    if not venv.exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", *REQUIREMENTS], check=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [str(python), str(Path(__file__).resolve()), *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=environment, check=False).returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, required=True, help="folder of the scratch venv")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="fixture to write")
    parser.add_argument("--seed", type=int, default=11, help="seed of weights, data and sampling")
    args = parser.parse_args()
    if Path(sys.prefix).resolve() == args.venv.resolve():
        # Importable only inside the scratch environment.
        sys.path.insert(0, str(REPOSITORY))
        from upstream_run import record

        record(args.output.resolve(), args.seed)
    else:
        _enter(args.venv.absolute())


if __name__ == "__main__":
    main()
