"""What a run watches by itself: steps that are skipped, and why and how it ends early."""
