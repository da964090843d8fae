"""Turns of an agent of LangChain with its own memory or with precis. See tests/agents.rs."""

import os
import sys

from langchain.agents import create_agent
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.messages import HumanMessage, messages_from_dict
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from memory_langchain import PrecisChatMessageHistory


@tool
def look(box: int) -> str:
    """Looks into a box."""
    return f"In box {box} are {box + 2} lemons."


@tool
def weigh(box: int) -> dict:
    """Weighs a box."""
    return {"box": box, "kilograms": box / 4, "notes": ["Zoë", None]}


def main(store, turns):
    model = ChatOpenAI(model="scripted", base_url=os.environ["MODEL_URL"], api_key="none", max_retries=0)
    agent = create_agent(model, [look, weigh], system_prompt="You know the boxes.")
    memory = InMemoryChatMessageHistory()
    history = PrecisChatMessageHistory("agents") if store == "precis" else memory
    for turn in range(turns):
        messages = [*history.messages, HumanMessage(f"Turn {turn}: what is in box {turn}?")]
        new = agent.invoke({"messages": messages})["messages"][len(messages) - 1 :]
        history.add_messages(new)
        if store == "precis":
            memory.add_messages(new)
    if store == "precis":
        assert messages_from_dict(history.session.originals()) == memory.messages, "the messages differ"


main(sys.argv[1], int(sys.argv[2]))
