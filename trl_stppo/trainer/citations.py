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
    author  = {Li, Chenliang and Elmahdy, Adel and Boyd, Alex and Wang, Zhongruo and
        Garcia, Alfredo and Bhatia, Parminder and Kass-Hout, Taha and Xiao, Cao and
        Hong, Mingyi},
    year    = 2025,
    journal = {arXiv preprint arXiv:2511.20718}
}"""
