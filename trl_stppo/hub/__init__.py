"""What a run leaves on the Hub: the model card, `agent.json`, and finding it all again."""
