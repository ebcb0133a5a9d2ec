"""Many seeded answers of one model at a time, of a given length."""

import asyncio
from collections.abc import Callable

import openai
from streams import TIMEOUT_S

MODEL = "sorter-llama"


async def seeded_answers(
    url: str, requests: int, tokens: int, prompt: Callable[[int], str]
) -> list[str]:
    """Return the text of each request, by its number: sampled with that seed, `tokens` long."""
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as client:

        async def answer(index: int) -> str:
            done = await client.completions.create(
                model=MODEL, prompt=prompt(index), max_tokens=tokens, seed=index,
                temperature=0.8, extra_body={"ignore_eos": True},
            )  # fmt: skip
            assert done.usage is not None
            assert done.usage.completion_tokens == tokens
            return done.choices[0].text

        return await asyncio.gather(*(answer(index) for index in range(requests)))
