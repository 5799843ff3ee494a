"""What the configurations check, and the names that they had before."""
