"""Stabilizers of off-policy updates, one per file; every file of this folder registers its stabilizer."""

import importlib
import pkgutil

from .base import GRADIENT, STABILIZERS, STEP, Stabilizer, check_linear, register, scales, weighs  # noqa: F401
from .trust_region import TrustRegion  # noqa: F401

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
