"""An agent as files, and on the Hub."""
