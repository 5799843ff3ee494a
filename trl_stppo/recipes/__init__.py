"""Whole tasks, each in a folder of its own. Nothing outside imports them: leave one out, the rest runs."""
