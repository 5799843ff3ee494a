"""Publish runs on the Hub, with model card and `agent.json`, and load them."""
