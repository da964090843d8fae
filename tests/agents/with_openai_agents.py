"""Turns of an agent of the OpenAI Agents SDK with its own memory or with precis. See tests/agents.rs."""

import asyncio
import os
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, SQLiteSession, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

from memory_openai_agents import PrecisSession


@function_tool
def look(box: int) -> str:
    """Looks into a box."""
    return f"In box {box} are {box + 2} lemons."


@function_tool
def weigh(box: int) -> dict:
    """Weighs a box."""
    return {"box": box, "kilograms": box / 4, "notes": ["Zoë", None]}


class Both(PrecisSession):
    """precis, next to a session in memory that receives the same items."""

    def __init__(self, session_id):
        super().__init__(session_id)
        self.memory = SQLiteSession(session_id)

    async def add_items(self, items):
        await self.memory.add_items(items)
        await super().add_items(items)

    async def pop_item(self):
        item = await super().pop_item()
        assert item == await self.memory.pop_item(), "the popped items differ"
        return item

    async def assert_same(self):
        kept = await asyncio.to_thread(self.session.originals)
        assert sum(kept, []) == await self.memory.get_items(), "the items differ"


async def main(store, turns):
    set_tracing_disabled(True)
    client = AsyncOpenAI(api_key="none", base_url=os.environ["MODEL_URL"], max_retries=0)
    model = OpenAIChatCompletionsModel("scripted", client)
    agent = Agent(name="Ada", instructions="You know the boxes.", model=model, tools=[look, weigh])
    session = Both("agents") if store == "precis" else SQLiteSession("agents")
    for turn in range(turns):
        await Runner.run(agent, f"Turn {turn}: what is in box {turn}?", session=session)
    if store == "precis":
        await session.assert_same()
        # The last two turns. The first one of them has a text and a call in one message.
        popped = []
        for _ in range(7):
            popped.append(await session.pop_item())
            await session.assert_same()
        await session.add_items(popped[::-1])
        await session.assert_same()
        await pop_all(Both("popped"))


async def pop_all(session):
    assert await session.pop_item() is None
    await session.add_items([{"role": "user", "content": "x" * 20_000}, {"role": "assistant", "content": "No."}])
    assert (await session.pop_item())["content"] == "No."
    assert (await session.pop_item())["content"] == "x" * 20_000
    assert await session.pop_item() is None and await session.get_items() == []
    await session.clear_session()


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
