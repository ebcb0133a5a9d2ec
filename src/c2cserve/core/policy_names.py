"""The names of the policies that a server can run."""

from typing import Literal

PolicyName = Literal[
    "c2cserve", "slinfer", "serverlessllm", "sllm+c", "aegaeon", "aegaeon-hybrid", "superinfer",
    "fcfs",
    "c2cserve-published", "c2cserve-static", "c2cserve-alpha-0", "c2cserve-alpha-0.5",
    "c2cserve-alpha-1", "c2cserve-no-chunks", "c2cserve-no-placement",
]  # fmt: skip
"""`c2cserve` is this project's. The others are published systems, to compare with: the presets of
`policy.baselines.presets` with these names."""

OWN: PolicyName = "c2cserve"
