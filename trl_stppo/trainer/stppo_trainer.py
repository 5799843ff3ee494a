"""ST-PPO: PPO with turn-level importance ratios, and stabilizers of its off-policy updates."""

from __future__ import annotations

from .ppo_trainer import PPOTrainer
from .stppo_config import STPPOConfig

CITATION = """\
@article{li2025stppo,
    title   = {{ST-PPO}: Stabilized Off-Policy Proximal Policy Optimization for Multi-Turn Agents Training},
    author  = {Li, Chenliang and Elmahdy, Adel and Boyd, Alex and Wang, Zhongruo and
        Garcia, Alfredo and Bhatia, Parminder and Kass-Hout, Taha and Xiao, Cao and
        Hong, Mingyi},
    year    = 2025,
    journal = {arXiv preprint arXiv:2511.20718}
}"""


class STPPOTrainer(PPOTrainer):
    """Stabilised off-policy PPO for multi-turn agents.

    It accepts `PPOTrainer`'s arguments and an [`STPPOConfig`]. `variant` chooses between token PPO
    (`"ppo"`), turn-level ratios (`"turn-ppo"`), stabilizers (`"s-ppo"`) and both (`"st-ppo"`).

    Source: Li et al., arXiv:2511.20718v1. We know the published correction of the clipping bias only at
    second hand; `docs/algorithm.md` lists the paper's parts and our own.
    """

    config_class = STPPOConfig
    _tag_names = ["trl", "stppo", "reinforcement-learning", "multi-turn"]  # noqa: RUF012
    _name = "ST-PPO"
    _paper = {  # noqa: RUF012
        "title": "ST-PPO: Stabilized Off-Policy Proximal Policy Optimization for Multi-Turn Agents "
        "Training",
        "id": "2511.20718",
        "citation": CITATION,
    }
