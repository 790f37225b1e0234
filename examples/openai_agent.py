"""An agent written with the public `openai` client: it asks for the last digit, and once more after a wrong answer.

platform-launch configs/reasoning/agent.yaml
"""

from functools import cache

from openai import AsyncOpenAI


@cache
def client(base_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="of each call", max_retries=0)


async def solve(question: dict, base_url: str, api_key: str) -> float:
    policy = client(base_url).with_options(api_key=api_key)  # shares its connections
    messages = [{"role": "user", "content": question["text"]}]
    for reward in (1.0, 0.5):
        answer = await policy.chat.completions.create(model="policy", messages=messages, max_tokens=1)
        text = answer.choices[0].message.content
        if text == question["answer"]:
            return reward
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "no:"}]
    return 0.0
