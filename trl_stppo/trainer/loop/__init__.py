"""The way of the data: rows, episodes, batch, rewards, advantages, update."""
