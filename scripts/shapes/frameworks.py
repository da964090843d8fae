"""Shapes that applications build with the OpenAI Agents SDK, LangChain and Pydantic AI.

Each framework is used both ways: its messages in the format of a provider, as it sends them or converts them itself, and
its own messages as it stores them.
"""

import json

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.models.chatcmpl_converter import Converter
from corpus import PDF, PNG, Provider, anthropic_message, call, completion, response, write
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage, convert_to_openai_messages, message_to_dict
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import BinaryContent, ModelRetry
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

ASKED = "Where do we keep the spare key?"
FINAL = "Under the third flowerpot."
LOOK = call("call_1", "look", {"place": "boathouse"})
ASK = call("call_2", "look", {"place": "shed"})
CALLS = completion({"content": None, "tool_calls": [LOOK, ASK]}, "tool_calls")
FOUND = ["spare key", "boathouse", "ropes", "flowerpot"]
THOUGHT = {"type": "thinking", "thinking": "Recall the gardening talk.", "signature": "ErUBCkYIBxgCIkA" * 8}
TOOL_USE = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"place": "boathouse"}}

provider = Provider()


def look(place: str) -> str:
    """Looks at a place."""
    return "nothing but ropes" if place == "boathouse" else "a wheelbarrow"


def openai_agents():
    set_tracing_disabled(True)
    client = AsyncOpenAI(api_key="none", base_url=f"{provider.url}/v1", max_retries=0)

    def run(model, *replies):
        provider.replies.extend(replies)
        agent = Agent(name="Ada", model=model("m", client), tools=[function_tool(look)])
        items = Runner.run_sync(agent, ASKED).to_input_list()
        provider.requests.clear()
        return items

    name = "openai-agents"
    items = run(OpenAIChatCompletionsModel, CALLS, completion({"content": FINAL}))
    write("openai-agents-converted", name, "Converter.items_to_messages(result.to_input_list())",
          Converter.items_to_messages(items), finds=FOUND)  # fmt: skip
    write("openai-agents-items", name, "result.to_input_list()", items, rejects=("messages[1].role", "function_call"))
    write("openai-agents-items-text", name, "result.to_input_list()",
          run(OpenAIChatCompletionsModel, completion({"content": FINAL})), finds=["spare key", "flowerpot"])  # fmt: skip
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "The gardening talk."}]}
    part = {"type": "output_text", "text": FINAL, "annotations": [], "logprobs": []}
    said = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
    items = run(OpenAIResponsesModel, response([thought, said]))
    write("openai-agents-items-reasoning", name, "result.to_input_list() of the Responses API", items,
          rejects=("messages[1].role", "reasoning"))  # fmt: skip
    write("openai-agents-items-responses", name, "result.to_input_list() of the Responses API",
          run(OpenAIResponsesModel, response([said])), finds=["spare key", "flowerpot"])  # fmt: skip


def langchain():
    chat = ChatOpenAI(model="m", base_url=f"{provider.url}/v1", api_key="none", max_retries=0)
    claude = ChatAnthropic(model="m", base_url=provider.url, api_key="none", max_retries=0, max_tokens=2048)
    name, converted = "langchain-core", "convert_to_openai_messages(messages)"

    def parsed(model, reply):
        provider.replies.append(reply)
        message = model.invoke([HumanMessage(ASKED)])
        provider.requests.clear()
        return message

    def wire(model, messages, reply):
        provider.replies.append(reply)
        model.invoke(messages)
        return provider.sent()

    results = [ToolMessage("nothing but ropes", tool_call_id="call_1", name="look"),
               ToolMessage("a wheelbarrow", tool_call_id="call_2", name="look")]  # fmt: skip
    turn = [HumanMessage(ASKED), parsed(chat, CALLS), *results, parsed(chat, completion({"content": FINAL}))]
    write("langchain-converted", name, converted, convert_to_openai_messages(turn), finds=FOUND)
    write("langchain-openai-request", "langchain-openai", "request of ChatOpenAI",
          wire(chat, turn, completion({"content": "ok"})), finds=FOUND)  # fmt: skip
    write("langchain-message-to-dict", name, "[message_to_dict(message) for message in messages]",
          [message_to_dict(message) for message in turn], rejects=("messages[0].role",))  # fmt: skip
    write("langchain-model-dump", name, "[message.model_dump() for message in messages]", turn,
          rejects=("messages[0].role",))  # fmt: skip
    text = {"type": "text", "text": "Compare this with the chart."}
    image = HumanMessage([text, {"type": "image", "base64": PNG, "mime_type": "image/png"}], name="Ada")
    write("langchain-image", name, converted, convert_to_openai_messages([image]), finds=["chart"])
    pdf = {"type": "file", "base64": PDF, "mime_type": "application/pdf", "filename": "insurance.pdf"}
    write("langchain-pdf", "langchain-openai", "request of ChatOpenAI",
          wire(chat, [HumanMessage([text, pdf])], completion({"content": "ok"})), finds=["chart"])  # fmt: skip
    failed = ToolMessage("TimeoutError: the camera is offline", tool_call_id="call_1", status="error")
    write("langchain-tool-error", name, converted,
          convert_to_openai_messages([HumanMessage(ASKED), AIMessage("", tool_calls=[
              {"id": "call_1", "name": "look", "args": {"place": "boathouse"}, "type": "tool_call"}]), failed]),
          finds=["boathouse", "camera"])  # fmt: skip
    blocks = [{"type": "reasoning", "reasoning": "The gardening talk."}, {"type": "text", "text": FINAL}]
    write("langchain-reasoning", name, converted,
          convert_to_openai_messages([HumanMessage(ASKED), AIMessage(content=blocks)]),
          finds=["flowerpot"], hides=["gardening talk"])  # fmt: skip

    called = parsed(claude, anthropic_message([THOUGHT, TOOL_USE], "tool_use"))
    turn = [HumanMessage(ASKED), called, ToolMessage("nothing but ropes", tool_call_id="toolu_1")]
    found, hidden = ["spare key", "boathouse", "ropes"], ["gardening talk"]
    write("langchain-anthropic-request", "langchain-anthropic", "request of ChatAnthropic",
          wire(claude, turn, anthropic_message([{"type": "text", "text": "ok"}])),
          format="anthropic", finds=found, hides=hidden)  # fmt: skip
    write("langchain-anthropic-converted", name, f"{converted} of ChatAnthropic", convert_to_openai_messages(turn),
          finds=found, hides=hidden)  # fmt: skip


def pydantic_ai():
    name = "pydantic-ai-slim"
    chat = OpenAIChatModel("m", provider=OpenAIProvider(base_url=f"{provider.url}/v1", api_key="none"))
    claude = AnthropicModel("m", provider=AnthropicProvider(base_url=provider.url, api_key="none"))

    def run(model, prompt, *replies, tools=(look,), history=None):
        provider.replies.extend(replies)
        result = PydanticAgent(model, tools=list(tools)).run_sync(prompt, message_history=history)
        return provider.sent(), result

    def write_request(shape, messages, model="OpenAIChatModel", **expected):
        write(f"pydantic-ai-{shape}", name, f"request of {model}", messages, **expected)

    said = completion({"content": FINAL})
    _, result = run(chat, ASKED, CALLS, said)
    sent, _ = run(chat, "Thanks!", said, history=result.all_messages())
    write_request("request", sent, finds=FOUND)
    write("pydantic-ai-native", name, "result.all_messages_json()", json.loads(result.all_messages_json()),
          rejects=("messages[0].role",))  # fmt: skip

    def flaky(place: str) -> str:
        """Looks at a place."""
        raise ModelRetry(f"Is {place} a place with a roof?")

    retried = completion({"content": None, "tool_calls": [call("call_1", "flaky", {"place": "boathouse"})]}, "tool_calls")
    sent, _ = run(chat, ASKED, retried, said, tools=[flaky])
    write_request("retry", sent, finds=["boathouse", "roof"])
    media = [BinaryContent(data=b"png", media_type="image/png"), BinaryContent(data=b"%PDF", media_type="application/pdf"),
             BinaryContent(data=b"RIFF", media_type="audio/wav")]  # fmt: skip
    for kind, content in zip(["image", "pdf", "audio"], media, strict=True):
        sent, _ = run(chat, ["Compare this with the chart.", content], said)
        write_request(kind, sent, finds=["chart"])
    thinking = completion({"content": FINAL, "reasoning_content": "The gardening talk."})
    _, result = run(chat, ASKED, thinking)
    sent, _ = run(chat, "Thanks!", said, history=result.all_messages())
    write_request("thinking", sent, finds=["flowerpot"], hides=["gardening talk"])
    sent, _ = run(claude, ASKED, anthropic_message([THOUGHT, TOOL_USE], "tool_use"),
                  anthropic_message([{"type": "text", "text": FINAL}]))  # fmt: skip
    write_request("anthropic", sent, "AnthropicModel", format="anthropic", finds=["spare key", "boathouse", "ropes"],
                  hides=["gardening talk"])  # fmt: skip


if __name__ == "__main__":
    openai_agents()
    langchain()
    pydantic_ai()
