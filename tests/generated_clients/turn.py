"""The turn that the programs record, in the types of the official client, and where they record it."""

import sys
from collections.abc import Mapping

from anthropic.types import MessageParam, ToolParam
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from pydantic import TypeAdapter

url, SESSION, USER, key = sys.argv[1:]

question: ChatCompletionUserMessageParam = {
    "role": "user",
    "content": [{"type": "text", "text": "When does the ferry leave?"}],
}
call: ChatCompletionAssistantMessageParam = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "timetable", "arguments": '{"line": 3}'}}
    ],
}
result: ChatCompletionToolMessageParam = {"role": "tool", "tool_call_id": "call_1", "content": "09:00"}
answer: ChatCompletionAssistantMessageParam = {"role": "assistant", "content": "At nine."}

exchange: list[Mapping[str, object]] = [question, call, result, answer]

# The parts of a context, in the types of the official clients, which validate them.
openai_messages = TypeAdapter(list[ChatCompletionMessageParam])
openai_tools = TypeAdapter(list[ChatCompletionFunctionToolParam])
anthropic_messages = TypeAdapter(list[MessageParam])
anthropic_tools = TypeAdapter(list[ToolParam])
