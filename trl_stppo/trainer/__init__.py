"""The trainers and their configurations."""
