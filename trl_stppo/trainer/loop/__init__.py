"""The way of the data up to the update: rows, who plays and samples, rollout, rewards, batch, log.

`ppo_trainer.py` calls these in order. `trl_stppo.rollout` plays single episodes and knows no trainer.
"""
