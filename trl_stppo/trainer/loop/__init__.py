"""The steps of a rollout and an update, in the order in which `ppo_trainer.py` calls them."""
