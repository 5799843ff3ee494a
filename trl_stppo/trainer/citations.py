"""BibTeX for the model cards."""

PPO = """\
@article{schulman2017proximal,
    title   = {Proximal Policy Optimization Algorithms},
    author  = {Schulman, John and Wolski, Filip and Dhariwal, Prafulla and Radford, Alec and Klimov, Oleg},
    year    = 2017,
    journal = {arXiv preprint arXiv:1707.06347}
}"""

ST_PPO = """\
@article{li2025stppo,
    title   = {{ST-PPO}: Stabilized Off-Policy Proximal Policy Optimization for Multi-Turn Agents Training},
    author  = {Li and others},
    year    = 2025,
    journal = {arXiv preprint arXiv:2511.20718}
}"""
