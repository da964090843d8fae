"""Turns of an agent of Pydantic AI with its own memory or with precis. See tests/agents.rs."""

import os
import sys

from pydantic_ai import Agent, ModelMessagesTypeAdapter
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

import memory_pydantic_ai as precis
from precis_client import Session


def look(box: int) -> str:
    """Looks into a box."""
    return f"In box {box} are {box + 2} lemons."


def weigh(box: int) -> dict:
    """Weighs a box."""
    return {"box": box, "kilograms": box / 4, "notes": ["Zoë", None]}


def main(store, turns):
    provider = OpenAIProvider(base_url=os.environ["MODEL_URL"], api_key="none")
    model = OpenAIChatModel("scripted", provider=provider)
    agent = Agent(model, instructions="You know the boxes.", tools=[look, weigh])
    memory = []
    for turn in range(turns):
        history = precis.load("agents") if store == "precis" else memory
        result = agent.run_sync(f"Turn {turn}: what is in box {turn}?", message_history=history)
        memory = [*memory, *result.new_messages()]
        if store == "precis":
            precis.save("agents", result.new_messages())
    if store == "precis":
        kept = ModelMessagesTypeAdapter.validate_python(Session("agents").originals())
        assert kept == memory, "the messages differ"


main(sys.argv[1], int(sys.argv[2]))
