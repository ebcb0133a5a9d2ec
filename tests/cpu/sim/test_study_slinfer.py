from c2cserve.policy.baselines.presets import PRESETS
from c2cserve.sim.studies.slinfer import run


def test_sharing_and_cpus_serve_more_than_exclusive_gpus() -> None:
    served = {
        name: run(PRESETS[name], "13B", 64, duration_s=60.0, nodes=2)
        for name in ("serverlessllm", "slinfer", "c2cserve")
    }
    assert len({one.requests for one in served.values()}) == 1, "the same trace for all"
    assert served["serverlessllm"].met <= served["slinfer"].met, "equal in this minute"
    assert served["serverlessllm"].met < served["c2cserve"].met
    assert served["serverlessllm"].cpus == 0.0
