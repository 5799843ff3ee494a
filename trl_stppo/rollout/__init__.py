"""Episodes: how they are played, recorded, and collated."""
