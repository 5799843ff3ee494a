"""Publish trained agents on the Hub, with model card and `agent.json`, and load published agents."""
