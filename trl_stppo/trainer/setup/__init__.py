"""What the constructor decides and builds: who plays, who pays, which models."""
