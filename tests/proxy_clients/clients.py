"""The Python clients for check.py. Each keeps its messages as its documentation says.

python clients.py CLIENT URL SESSION
"""

import json
import os
import sys
import warnings

SYSTEM = "You add numbers."
CLIENT, URL, SESSION = sys.argv[1:]
# The questions, each with the answer to whether it is streamed.
TURNS = json.loads(os.environ["PRECIS_PROXY_CLIENTS_QUESTIONS"])
HEADERS = {"x-precis-session": SESSION}
IN_PATH = f"{URL}/proxy/{SESSION}"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
ANTHROPIC_TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}


def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


def chat_results(calls):
    return [{"role": "tool", "tool_call_id": call.id, "content": add(**json.loads(call.function.arguments))} for call in calls]


def openai_python(select=lambda messages, new: messages, retries=0):
    from openai import OpenAI

    client = OpenAI(api_key="none", base_url=f"{URL}/v1", default_headers=HEADERS, max_retries=retries)
    messages = []
    for text, streamed in TURNS:
        # The client repeats no stream that has begun.
        streamed = streamed and not retries
        new = [{"role": "user", "content": text}]
        while new:
            messages += new
            sent = [{"role": "system", "content": SYSTEM}, *select(messages, new)]
            request = {"model": "m", "messages": sent, "tools": [TOOL]}
            if streamed:
                with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
                    message = stream.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.create(**request).choices[0].message
            messages.append(message)
            new = chat_results(message.tool_calls or [])


def last_questions(messages, _):
    """Leaves out all but the last questions and what follows them, as clients do that limit their list."""
    starts = [index for index, message in enumerate(messages) if isinstance(message, dict) and message["role"] == "user"]
    return messages[starts[max(len(starts) - 4, 0)] :]


def anthropic_python(**mark):
    from anthropic import Anthropic

    client = Anthropic(api_key="none", base_url=IN_PATH, max_retries=0)
    messages = []
    for text, streamed in TURNS:
        content = [{"type": "text", "text": text}]
        while content:
            messages.append({"role": "user", "content": content})
            # Agents mark the newest message only.
            marked = [*content[:-1], {**content[-1], **mark}]
            sent = [*messages[:-1], {"role": "user", "content": marked}]
            request = {"model": "m", "max_tokens": 500, "messages": sent, "tools": [ANTHROPIC_TOOL]}
            request["system"] = [{"type": "text", "text": SYSTEM, **mark}] if mark else SYSTEM
            if streamed:
                with client.messages.stream(**request) as stream:
                    message = stream.get_final_message()
            else:
                message = client.messages.create(**request)
            messages.append({"role": "assistant", "content": message.content})
            calls = [block for block in message.content if block.type == "tool_use"]
            content = [{"type": "tool_result", "tool_use_id": call.id, "content": add(**call.input)} for call in calls]


def langchain(model):
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_core.tools import tool

    adds = tool(add)
    model = model.bind_tools([adds])
    messages = [SystemMessage(SYSTEM)]
    for text, streamed in TURNS:
        new = [HumanMessage(text)]
        while new:
            messages += new
            if streamed:
                message = None
                for chunk in model.stream(messages):
                    message = chunk if message is None else message + chunk
            else:
                message = model.invoke(messages)
            messages.append(message)
            new = [adds.invoke(call) for call in message.tool_calls]


def langchain_openai():
    from langchain_openai import ChatOpenAI

    langchain(ChatOpenAI(model="m", api_key="none", base_url=f"{URL}/v1", default_headers=HEADERS, max_retries=0))


def langchain_anthropic():
    from langchain_anthropic import ChatAnthropic

    langchain(ChatAnthropic(model="m", api_key="none", base_url=IN_PATH, max_tokens=500, max_retries=0))


def litellm(model, base_url):
    import litellm

    litellm.suppress_debug_info = True
    warnings.filterwarnings("ignore", "Pydantic serializer warnings")
    messages = [{"role": "system", "content": SYSTEM}]
    for text, streamed in TURNS:
        new = [{"role": "user", "content": text}]
        while new:
            messages += new
            answer = litellm.completion(
                model,
                messages,
                api_base=base_url,
                api_key="none",
                extra_headers=HEADERS,
                tools=[TOOL],
                stream=streamed,
                max_tokens=500,
            )
            if streamed:
                answer = litellm.stream_chunk_builder(list(answer), messages=messages)
            message = answer.choices[0].message
            messages.append(message)
            new = chat_results(message.tool_calls or [])


def llm():
    import tempfile
    from pathlib import Path

    folder = tempfile.mkdtemp()
    os.environ["LLM_USER_PATH"] = folder
    model = {"model_id": "m", "model_name": "m", "api_base": f"{URL}/v1", "headers": HEADERS, "supports_tools": True}
    Path(folder, "extra-openai-models.yaml").write_text(json.dumps([model]))
    import llm

    conversation = llm.get_model("m").conversation(tools=[add])
    for number, (text, streamed) in enumerate(TURNS):
        # Only the first prompt has the system prompt.
        conversation.chain(text, system=None if number else SYSTEM, stream=streamed).text()


CLIENTS = {
    "openai": openai_python,
    "openai-trimmed": lambda: openai_python(last_questions),
    "openai-newest": lambda: openai_python(lambda _, new: new),
    "openai-lossy": lambda: openai_python(retries=2),
    "openai-newest-lossy": lambda: openai_python(lambda _, new: new, retries=2),
    "anthropic": anthropic_python,
    "anthropic-cached": lambda: anthropic_python(cache_control={"type": "ephemeral"}),
    "langchain-openai": langchain_openai,
    "langchain-anthropic": langchain_anthropic,
    "litellm-openai": lambda: litellm("openai/m", f"{URL}/v1"),
    "litellm-anthropic": lambda: litellm("anthropic/m", URL),
    "llm": llm,
}
CLIENTS[CLIENT]()
