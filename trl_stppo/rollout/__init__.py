"""Playing, recording and collating of episodes."""
