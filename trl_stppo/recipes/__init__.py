"""Recipes: complete tasks, one per folder. The rest of the package does not import recipes."""
