"""The dry run as a fixture."""

from tests.kit.dry_run_kit import dry_run
from tests.kit.published import on_the_hub

__all__ = ["dry_run", "on_the_hub"]
