"""The steps of a rollout and an update, in the order in which `ppo_trainer.py` calls them.

rows, player (with sampler): who is asked what, and plays; rollout, batch: what came of it;
policy_comparison (with forward): log-probabilities; rewards, turn_rewards: what it has earned; targets:
advantages; log: what is shown; mini_batches, stale: how the update gets it. `trl_stppo.rollout` plays
single episodes and knows no trainer.
"""
