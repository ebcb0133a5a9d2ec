"""The studies of streaming weights say what the paper says, as far as it is in the model."""

from dataclasses import replace

from c2cserve.sim.report import report
from c2cserve.sim.studies import c2cserve, interference
from c2cserve.sim.studies.hybrid import GemmShape
from c2cserve.sim.world.hardware import build


def test_the_cost_model_gives_figure_4s_bytes_and_times() -> None:
    gemm, simulated = GemmShape(n=16384, k=4096), build("gh200").slices[0]
    sym, asym = gemm.moved(10240, 1.0, simulated), gemm.moved(10240, 0.0, simulated)
    assert round(sym.link_bytes / 1e9, 2) == 5.37
    assert round(sym.hbm_bytes / 1e9, 2) == 1.23
    assert round(asym.link_bytes / 1e9, 2) == 0.13
    assert round(asym.hbm_bytes / 1e9, 2) == 5.18
    assert round(1e3 * sym.alone_s(384e9, 4e12), 1) == 16.4
    assert round(1e3 * asym.alone_s(384e9, 4e12), 1) == 4.0


def test_interference_grows_with_the_footprint_as_published() -> None:
    gaps = [y for _, y in interference.footprint().series["simulated"]]
    assert abs(gaps[0] - 28) < 5
    assert abs(gaps[-1] - 42) < 5
    assert gaps == sorted(gaps)


def test_alpha_follows_every_step_of_contention() -> None:
    series = interference.alpha_steps().series
    taken, best = (dict(series[name]) for name in ("controlled", "best alpha"))
    for settled in (95, 195, 295, 395, 495):
        assert taken[settled] <= best[settled] / 0.9 * 1.02


def test_a_switch_takes_as_long_as_the_paper_measured() -> None:
    _, findings = c2cserve._starts(0, 1.0)
    dense = next(f for f in findings if f.what == "switch, dense, C2CServe")
    assert 40 <= float(dense.ours.split()[0]) <= 70


def test_prompts_of_models_whose_weights_stream_are_in_time_beside_others() -> None:
    """Each has steps of its own, and a step reads all the weights that it uses. When the time of
    one step was divided among the models, it held 16 tokens, and a tenth was in time."""
    trace = "rate=1,duration=600,sources=2,zipf=0.5,cv=3,prompt=220,output=200"
    paper = replace(c2cserve._PAPER, preset=c2cserve._ALONE)
    done = report(c2cserve._run(paper, "gh200", "qwen3-30b-a3b*2", trace, 0))
    assert done.ttft_attainment > 0.85


def test_chunks_are_no_smaller_because_the_link_hides_what_prompts_cost() -> None:
    """A step took as long with a prompt as without it, which was taken for not knowing. So each
    step held 16 tokens of a prompt, and a fifth of the requests were late."""
    trace = "rate=6,duration=60,sources=16,zipf=0.5,cv=2,prompt=220,output=200"
    done = report(c2cserve._run(c2cserve._PAPER, "rubin:mig2", "llama-3.2-3b*16", trace, 0))
    assert done.slo_attainment > 0.95
