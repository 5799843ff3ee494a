"""The dry run as a fixture."""

from tests.kit.dry_run_kit import dry_run

__all__ = ["dry_run"]
