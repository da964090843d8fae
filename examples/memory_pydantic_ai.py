"""precis for Pydantic AI: agent.run_sync(text, message_history=load("demo")); save("demo", result.new_messages())."""

from pydantic_ai import ModelMessagesTypeAdapter as Messages
from pydantic_ai import ModelRequest, ModelResponse
from pydantic_ai.messages import SystemPromptPart, TextPart, ToolCallPart, ToolReturnPart, UserPromptPart

from precis_client import Session


def to_chat(message):
    if message.kind == "response":
        calls = [(c.tool_call_id, {"name": c.tool_name, "arguments": c.args_as_json_str()}) for c in message.tool_calls]
        calls = [{"id": id, "type": "function", "function": function} for id, function in calls]
        return [{"role": "assistant", "content": message.text, "tool_calls": calls}]
    return [part_to_chat(part) for part in message.parts if part.part_kind != "system-prompt"]


def part_to_chat(part):
    if part.part_kind != "user-prompt":
        return {"role": "tool", "tool_call_id": part.tool_call_id, "content": str(part.content)}
    content = [part.content] if isinstance(part.content, str) else part.content
    return {"role": "user", "content": "\n".join(text for text in content if isinstance(text, str))}


def from_chat(message):
    role, content, calls = message["role"], message["content"] or "", message.get("tool_calls", [])
    if role == "assistant":
        calls = [ToolCallPart(call["function"]["name"], call["function"]["arguments"], call["id"]) for call in calls]
        return Messages.dump_python([ModelResponse([TextPart(content), *calls])], mode="json")[0]
    prompt = SystemPromptPart if role == "system" else UserPromptPart
    part = ToolReturnPart("", content, message["tool_call_id"]) if role == "tool" else prompt(content)
    return Messages.dump_python([ModelRequest([part])], mode="json")[0]


def save(session, messages):
    Session(session).append(zip(Messages.dump_python(messages, mode="json"), map(to_chat, messages)))


def load(session):
    return Messages.validate_python(Session(session).load(from_chat))
