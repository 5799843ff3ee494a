"""Complete tasks, each in its own folder. No module outside imports them."""
