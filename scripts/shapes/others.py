"""Shapes that applications build with LiteLLM, LlamaIndex, Google's Agent Development Kit and Strands."""

import asyncio
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from corpus import PNG, Provider, anthropic_message, call, completion, plain, write
from google.adk.models.lite_llm import LiteLlm
from google.adk.models.llm_request import LlmRequest
from google.genai import types as genai
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.llms.openai.utils import to_openai_message_dicts
from strands.models.openai import OpenAIModel

ASKED = "Where do we keep the spare key?"
FINAL = "Under the third flowerpot."
HELLO = {"role": "user", "content": ASKED}
LOOK = call("call_1", "look", {"place": "boathouse"})
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "nothing but ropes"}

provider = Provider()


def of_litellm():
    def ask(model, reply):
        provider.replies.append(reply)
        url = provider.url if model.startswith("anthropic/") else f"{provider.url}/v1"
        answer = litellm.completion(model=model, messages=[HELLO], api_base=url, api_key="none")
        provider.requests.clear()
        return answer.choices[0].message

    dump = "response.choices[0].message.model_dump()"
    write("litellm-reply", "litellm", dump, [HELLO, ask("openai/m", completion({"content": FINAL}))],
          finds=["flowerpot"])  # fmt: skip
    write("litellm-reply-json", "litellm", "response.choices[0].message.json()",
          [HELLO, ask("openai/m", completion({"content": FINAL})).json()], finds=["flowerpot"])  # fmt: skip
    calls = ask("openai/m", completion({"content": None, "tool_calls": [LOOK]}, "tool_calls"))
    write("litellm-tools", "litellm", dump, [HELLO, calls, RESULT], finds=["boathouse", "ropes"])
    thinking = completion({"content": FINAL, "reasoning_content": "The gardening talk."})
    write("litellm-reasoning", "litellm", dump, [HELLO, ask("deepseek/deepseek-reasoner", thinking)],
          finds=["flowerpot"], hides=["gardening talk"])  # fmt: skip
    thought = {"type": "thinking", "thinking": "The gardening talk.", "signature": "ErUBCkYIBxgCIkA" * 8}
    tool_use = {"type": "tool_use", "id": "call_1", "name": "look", "input": {"place": "boathouse"}}
    text = {"type": "text", "text": "Let me check."}
    claude = ask("anthropic/claude-sonnet-4-5", anthropic_message([thought, text, tool_use], "tool_use"))
    write("litellm-anthropic", "litellm", f"{dump} of Anthropic's API", [HELLO, claude, RESULT],
          finds=["Let me check", "boathouse", "ropes"], hides=["gardening talk"])  # fmt: skip


def of_llama_index():
    name = "llama-index-core"
    text = TextBlock(text="Compare this with the chart.")
    image = ImageBlock(image=PNG.encode(), image_mimetype="image/png")
    write("llama-index-blocks", name, "to_openai_message_dicts(messages)",
          to_openai_message_dicts([ChatMessage(role="user", blocks=[text, image])], model="gpt-5"), finds=["chart"])  # fmt: skip
    turn = [ChatMessage(role="user", content=ASKED),
            ChatMessage(role="assistant", content=None, additional_kwargs={"tool_calls": [LOOK]}),
            ChatMessage(role="tool", content="nothing but ropes", additional_kwargs={"tool_call_id": "call_1", "name": "look"}),
            ChatMessage(role="assistant", content=FINAL)]  # fmt: skip
    write("llama-index-tools", name, "to_openai_message_dicts(messages)",
          to_openai_message_dicts(turn, model="gpt-5"), finds=["spare key", "boathouse", "ropes", "flowerpot"])  # fmt: skip
    write("llama-index-native", name, "[message.model_dump() for message in messages]", turn,
          finds=["spare key", "nothing but ropes", "flowerpot"])  # fmt: skip


def of_adk():
    name = "google-adk"
    model = LiteLlm(model="openai/m", api_base=f"{provider.url}/v1", api_key="none")
    called = genai.Part(function_call=genai.FunctionCall(id="call_1", name="look", args={"place": "boathouse"}))
    answered = genai.Part(function_response=genai.FunctionResponse(id="call_1", name="look", response={"seen": "ropes"}))
    turn = [genai.Content(role="user", parts=[genai.Part(text=ASKED)]), genai.Content(role="model", parts=[called]),
            genai.Content(role="user", parts=[answered])]  # fmt: skip

    async def run(contents):
        async for _ in model.generate_content_async(LlmRequest(model="openai/m", contents=contents)):
            pass

    provider.replies.append(completion({"content": FINAL}))
    asyncio.run(run(turn))
    write("google-adk-request", name, "request of LiteLlm", provider.sent(), finds=["spare key", "boathouse", "ropes"])
    thought = genai.Part(text="The gardening talk.", thought=True)
    said = genai.Content(role="model", parts=[thought, genai.Part(text=FINAL)])
    provider.replies.append(completion({"content": FINAL}))
    thanks = genai.Content(role="user", parts=[genai.Part(text="Thanks!")])
    asyncio.run(run([turn[0], said, thanks]))
    write("google-adk-thought", name, "request of LiteLlm", provider.sent(), finds=["flowerpot"], hides=["gardening talk"])
    write("google-adk-native", name, "[content.model_dump(exclude_none=True) for content in contents]",
          [plain(content.model_dump(mode="json", exclude_none=True)) for content in turn],
          rejects=("messages[1].role", "assistant"))  # fmt: skip


def of_strands():
    name = "strands-agents"
    used = {"toolUse": {"toolUseId": "call_1", "name": "look", "input": {"place": "boathouse"}}}
    result = {"toolResult": {"toolUseId": "call_1", "status": "success", "content": [{"text": "nothing but ropes"}]}}
    turn = [{"role": "user", "content": [{"text": ASKED}]}, {"role": "assistant", "content": [{"text": "Let me check."}, used]},
            {"role": "user", "content": [result]}, {"role": "assistant", "content": [{"text": FINAL}]}]  # fmt: skip
    write("strands-openai", name, "OpenAIModel.format_request_messages(agent.messages)",
          OpenAIModel.format_request_messages(turn), finds=["spare key", "boathouse", "ropes", "flowerpot"])  # fmt: skip
    write("strands-native", name, "agent.messages", turn, finds=["spare key", "Let me check", "flowerpot"])


if __name__ == "__main__":
    of_litellm()
    of_llama_index()
    of_adk()
    of_strands()
