"""Greedy streams of all specialists, long enough to be disturbed in the middle."""

import asyncio

import openai

TIMEOUT_S = 200.0
"""For connecting too, which by default may take 5 s."""
MODELS = ("sorter-llama", "adder-qwen", "reverser-moe", "chatter-qwen2")
PROMPTS = ("sort: dcba", "347+86=", "reverse: hello", "what is your name?")


async def stream_text(
    url: str, index: int, max_tokens: int, begun: asyncio.Event | None = None
) -> str:
    """One greedy stream, long enough (past the end of the answer) to be hit in the middle. `begun`
    is set when some of it is here."""
    which = index % len(MODELS)
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        chunks = await client.completions.create(
            model=MODELS[which],
            prompt=f"{PROMPTS[which]} {index}",
            temperature=0,
            max_tokens=max_tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        parts: list[str] = []
        async for chunk in chunks:
            parts += [choice.text for choice in chunk.choices]
            if begun is not None and len(parts) == 10:
                begun.set()
    return "".join(parts)


async def all_streams(
    url: str, count: int, max_tokens: int, begun: asyncio.Event | None = None
) -> list[str]:
    return await asyncio.gather(*(stream_text(url, i, max_tokens, begun) for i in range(count)))
