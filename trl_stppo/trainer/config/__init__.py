"""Checks of the configurations, and aliases of their options."""
