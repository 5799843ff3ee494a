"""Backends that sample one turn at a time for many episodes at once."""
