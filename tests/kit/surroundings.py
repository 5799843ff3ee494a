"""The environment of every process of the tests: offline, quiet, and with the same bits in every run."""

import os

QUIET = {
    **{"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
    **{"TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"},
}
# Without a mode of its own MKL adds in an order that depends on where a buffer lies in memory, so that two
# runs on one machine differ in their last bits. The number of threads decides, too; one is the quickest for
# small matrices. Another processor ends with other bits in any mode.
REPRODUCIBLE = {
    **{"MKL_CBWR": "AUTO", "MKL_DYNAMIC": "FALSE", "OMP_NUM_THREADS": "1"},
    # NumPy starts its threads when it is imported, and a process that has some cannot be forked (warm.py).
    "OPENBLAS_NUM_THREADS": "1",
}

# The trainings of most tests run on a GPU where it is "cuda", to find tensors on the wrong device.
USE_CPU = os.environ.get("STPPO_TESTS_ON") != "cuda"


def take() -> None:
    """Sets it for this process and those that it starts; call it before torch is imported.

    Another value of `REPRODUCIBLE` that is set already stays, and is what the tests run under.
    """
    os.environ.update(QUIET)
    for name, value in REPRODUCIBLE.items():
        os.environ.setdefault(name, value)
