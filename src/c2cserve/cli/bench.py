"""`c2cserve bench`: measure a server from the client's side, with standard requests only."""

from pathlib import Path
from typing import Annotated

import typer

from c2cserve.bench.cold import ColdOptions, run_cold
from c2cserve.bench.prompts import Endpoint, PromptKind
from c2cserve.bench.serve import Mode, ServeOptions, run_serve
from c2cserve.bench.switch import SwitchOptions, run_switch

app = typer.Typer(
    help="Measure any OpenAI-compatible server.", no_args_is_help=True, add_completion=False
)

UrlOption = Annotated[str, typer.Option(help="The server's root, or its /v1.")]
KeyOption = Annotated[str | None, typer.Option("--key", envvar="OPENAI_API_KEY", help="API key.")]
AdminKeyOption = Annotated[
    str | None, typer.Option(envvar="C2CSERVE_ADMIN_KEY", help="For the server's own figures.")
]


@app.command("serve")
def serve(
    url: UrlOption = "http://127.0.0.1:8000",
    key: KeyOption = None,
    model: Annotated[str, typer.Option(help="Models, comma separated, or all.")] = "all",
    mode: Annotated[Mode, typer.Option(help="How requests arrive.")] = Mode.CLOSED,
    concurrency: Annotated[int, typer.Option(min=1, help="Users of the closed loop.")] = 8,
    rate: Annotated[float, typer.Option(min=0.001, help="Requests/s, poisson.")] = 1.0,
    requests: Annotated[int | None, typer.Option(min=1, help="Send so many.")] = None,
    duration: Annotated[float | None, typer.Option(min=0.1, help="Send for so long, s.")] = None,
    input_len: Annotated[
        str, typer.Option(help="Tokens: 128, 64-512, exp:128, lognormal:120:0.8.")
    ] = "128",
    output_len: Annotated[str, typer.Option(help="Tokens, as --input-len.")] = "32",
    dataset: Annotated[
        Path | None, typer.Option(help="CSV of input_tokens,output_tokens to draw from.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="CSV(.gz) with t_s; func or model; input_tokens, output_tokens."),
    ] = None,
    where: Annotated[
        list[str] | None, typer.Option(help="COLUMN=VALUE: only these rows of the CSV.")
    ] = None,
    compress: Annotated[float, typer.Option(min=0.001, help="Trace time runs x faster.")] = 1.0,
    popularity: Annotated[str, typer.Option(help="Of models: uniform or zipf:1.0.")] = "uniform",
    input_cap: Annotated[int | None, typer.Option(min=1, help="Largest prompt.")] = None,
    output_cap: Annotated[int | None, typer.Option(min=1, help="Largest output.")] = None,
    endpoint: Annotated[Endpoint, typer.Option()] = Endpoint.COMPLETIONS,
    prompt: Annotated[
        PromptKind, typer.Option(help="Token ids, text, or auto: ask which the server takes.")
    ] = PromptKind.AUTO,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Full output lengths (vLLM's field).")
    ] = False,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    slo_ttft: Annotated[float, typer.Option(min=0, help="Target, s.")] = 1.0,
    slo_tpot: Annotated[float, typer.Option(min=0, help="Target, s.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Same seed, same requests.")] = 0,
    processes: Annotated[int, typer.Option(min=1, max=64, help="Of the generator.")] = 1,
    timeout: Annotated[float, typer.Option(min=0.1, help="Of one request, s.")] = 600.0,
    admin_key: AdminKeyOption = None,
    out: Annotated[Path | None, typer.Option(help="Write results as JSON.")] = None,
) -> None:
    """Latency percentiles, throughput and SLO attainment of an OpenAI-compatible server."""
    options = ServeOptions(
        url=url, models=tuple(model.split(",")), mode=mode, concurrency=concurrency,
        rate_per_s=rate, requests=requests, duration_s=duration, input_len=input_len,
        output_len=output_len, dataset=dataset, trace=trace, where=tuple(where or ()),
        compress=compress, popularity=popularity, input_cap=input_cap, output_cap=output_cap,
        endpoint=endpoint, prompt=prompt, ignore_eos=ignore_eos, temperature=temperature,
        slo_ttft_s=slo_ttft, slo_tpot_s=slo_tpot, seed=seed, processes=processes, timeout_s=timeout,
    )  # fmt: skip
    run_serve(options, key, admin_key, out)


@app.command("switch")
def switch(
    url: UrlOption = "http://127.0.0.1:8000",
    key: KeyOption = None,
    models: Annotated[str, typer.Option(help="Two or more, comma separated, or all.")] = "all",
    pairs: Annotated[int, typer.Option(min=20, help="Requests of either kind.")] = 200,
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 8,
    seed: Annotated[int, typer.Option(help="Same seed, same requests.")] = 0,
    admin_key: AdminKeyOption = None,
    out: Annotated[Path | None, typer.Option(help="Write results as JSON.")] = None,
) -> None:
    """What changing the model from one request to the next adds to the time to first token."""
    options = SwitchOptions(url, tuple(models.split(",")), pairs, input_len, seed)
    run_switch(options, key, admin_key, out)


@app.command("cold")
def cold(
    url: UrlOption = "http://127.0.0.1:8000",
    key: KeyOption = None,
    models: Annotated[str, typer.Option(help="Comma separated, or all.")] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Cold starts of each model.")] = 3,
    input_len: Annotated[int, typer.Option(min=1, help="Prompt tokens.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Output tokens.")] = 8,
    seed: Annotated[int, typer.Option(help="Same seed, same requests.")] = 0,
    admin_key: AdminKeyOption = None,
    out: Annotated[Path | None, typer.Option(help="Write results as JSON.")] = None,
) -> None:
    """Time to first token of models that are not in the pool.

    Works with a c2cserve, whose admin API unloads the models first, after requests under way."""
    options = ColdOptions(url, tuple(models.split(",")), rounds, input_len, output_len, seed)
    run_cold(options, key, admin_key, out)
