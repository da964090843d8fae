"""Shapes that applications build with the official clients of OpenAI and Anthropic.

User messages and tool results are captured as the client sends them; replies are what the client parsed, dumped by its
own methods.
"""

import json

import anthropic
import openai
from corpus import PDF, PNG, WAV, Provider, anthropic_message, call, completion, plain, response, write
from pydantic import BaseModel

provider = Provider()
chat = openai.OpenAI(api_key="none", base_url=f"{provider.url}/v1", max_retries=0)
claude = anthropic.Anthropic(api_key="none", base_url=provider.url, max_retries=0)

HELLO = {"role": "user", "content": "Where do we keep the spare key?"}


def sent(*messages):
    """Returns messages as the OpenAI client sends them."""
    provider.replies.append(completion({"content": "ok"}))
    chat.chat.completions.create(model="m", messages=list(messages))
    return provider.sent()


def reply(message, finish="stop"):
    """Returns the message that the OpenAI client makes of a completion."""
    provider.replies.append(completion(message, finish))
    answer = chat.chat.completions.create(model="m", messages=[HELLO])
    provider.sent()
    return answer.choices[0].message


def user(shape, produced, content, finds, **fields):
    write(f"openai-user-{shape}", "openai", produced, sent({"role": "user", "content": content, **fields}), finds=finds)


def answered(name, message, finds, finish="stop", dump=lambda message: message.model_dump(), **options):
    """Writes a question and its reply, as `model_dump()` by default."""
    produced = options.pop("produced", "completion.choices[0].message.model_dump()")
    turn = [HELLO, dump(reply(message, finish))]
    write(f"openai-{name}", "openai", produced, turn, finds=["spare key", *finds], **options)


def users():
    captured = "request of chat.completions.create"
    user("text", captured, "The boat is called Petrel.", ["Petrel"])
    user("name", captured, "I paid the harbour fee.", ["harbour fee"], name="Ada")
    user("unicode", captured, "Zoë sagt: „Grüße aus 東京“ 🙂 \u2028 <|endoftext|> \"\\", ["Grüße", "東京"])
    text = {"type": "text", "text": "Compare this with the chart."}
    user("parts", captured, [text, {"type": "text", "text": "And with the lighthouse log."}], ["lighthouse log"])
    image = {"type": "image_url", "image_url": {"url": "https://example.org/mast.png", "detail": "low"}}
    user("image-url", captured, [text, image], ["chart"])
    data = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
    user("image-data", captured, [text, data], ["chart"])
    pdf = {"type": "file", "file": {"filename": "insurance.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}}
    user("pdf", captured, [text, pdf], ["chart"])
    user("file-id", captured, [text, {"type": "file", "file": {"file_id": "file-6F2ksmvXxt4VdoqmHRw6kL"}}], ["chart"])
    user("audio", captured, [text, {"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}}], ["chart"])
    marked = {**text, "prompt_cache_breakpoint": {"mode": "explicit"}}
    user("cache-breakpoint", captured, [marked], ["chart"])
    for role in ["system", "developer"]:
        write(f"openai-{role}", "openai", captured, sent({"role": role, "content": "Be brief."}, HELLO),
              finds=["Be brief", "spare key"])  # fmt: skip


class Berth(BaseModel):
    harbour: str
    number: int


def replies():
    key = {"content": "Under the third flowerpot."}
    answered("reply-model-dump", {**key, "refusal": None, "annotations": []}, ["flowerpot"])
    answered("reply-exclude-none", key, ["flowerpot"], dump=lambda message: message.model_dump(exclude_none=True),
             produced="message.model_dump(exclude_none=True)")  # fmt: skip
    answered("reply-to-dict", {**key, "refusal": None}, ["flowerpot"], dump=lambda message: message.to_dict(),
             produced="message.to_dict()")  # fmt: skip
    answered("refusal", {"content": None, "refusal": "I can't reveal the alarm code."}, ["alarm code"])
    answered("empty-length", {"content": ""}, [], finish="length")
    answered("empty-content-filter", {"content": None}, [], finish="content_filter")
    answered("empty-tool-calls", {**key, "tool_calls": []}, ["flowerpot"])
    audio = {"id": "audio_68", "data": WAV * 40, "expires_at": 1760003600, "transcript": "Look behind the piano."}
    answered("audio", {"content": None, "audio": audio}, ["piano"])
    citation = {"start_index": 0, "end_index": 5, "title": "Tide tables", "url": "https://example.org/tides"}
    cited = {**key, "annotations": [{"type": "url_citation", "url_citation": citation}]}
    answered("annotations", cited, ["flowerpot"])
    thought = "The user hid it themselves; recall the gardening talk."
    answered("reasoning-content", {**key, "reasoning_content": thought}, ["flowerpot"], hides=["gardening talk"],
             produced="model_dump() of a reply of DeepSeek's API")  # fmt: skip
    details = [{"type": "reasoning.text", "text": thought, "signature": "c2ln", "format": "anthropic-claude-v1", "index": 0}]
    answered("reasoning-details", {**key, "reasoning": thought, "reasoning_details": details}, ["flowerpot"],
             hides=["gardening talk"], produced="model_dump() of a reply of OpenRouter's API")  # fmt: skip
    thinking = [{"type": "thinking", "thinking": [{"type": "text", "text": thought}]}, {"type": "text", **{"text": key["content"]}}]
    answered("mistral-thinking", {"content": thinking}, ["flowerpot"], hides=["gardening talk"],
             produced="model_dump() of a reply of Mistral's API")  # fmt: skip
    picture = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}, "index": 0}]
    answered("images", {**key, "images": picture}, ["flowerpot"],
             produced="model_dump() of a reply of OpenRouter's API with an image")  # fmt: skip

    provider.replies.append(completion({"content": '{"harbour": "Vlieland", "number": 12}', "refusal": None}))
    parsed = chat.chat.completions.parse(model="m", messages=[HELLO], response_format=Berth)
    provider.sent()
    write("openai-parsed", "openai", "chat.completions.parse(…).choices[0].message.model_dump()",
          [HELLO, parsed.choices[0].message.model_dump()], finds=["Vlieland"])  # fmt: skip

    deltas = [{"role": "assistant", "content": ""}, {"content": "Under the third "}, {"content": "flowerpot."},
              {"tool_calls": [{"index": 0, **call("call_s1", "look", {"place": "garden"})}]}]  # fmt: skip
    events = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    events.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1760000000, "model": "m"}
    stream = [f"data: {json.dumps({**chunk, 'choices': [event]})}\n\n" for event in events]
    provider.replies.append("".join(stream) + "data: [DONE]\n\n")
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    with chat.chat.completions.stream(model="m", messages=[HELLO], tools=[tool]) as streamed:
        message = streamed.get_final_completion().choices[0].message
    provider.sent()
    result = {"role": "tool", "tool_call_id": "call_s1", "content": "a rusty key"}
    write("openai-streamed", "openai", "stream.get_final_completion().choices[0].message.model_dump()",
          [HELLO, message.model_dump(), result], finds=["flowerpot", "rusty"])  # fmt: skip


def tools():
    look, ask = call("call_1", "look", {"place": "boathouse"}), call("call_2", "ask_neighbour", {"name": "Wubbo"})
    calling = reply({"content": None, "tool_calls": [look, ask]}, "tool_calls")
    results = [{"role": "tool", "tool_call_id": "call_1", "content": "nothing but ropes"},
               {"role": "tool", "tool_call_id": "call_2", "content": "He has the duplicate."}]  # fmt: skip
    final = reply({"content": "Your neighbour Wubbo has it."})
    dump = "model_dump()"
    write("openai-tools-parallel", "openai", dump,
          [HELLO, calling.model_dump(), *results, final.model_dump()],
          finds=["boathouse", "ropes", "duplicate", "Wubbo"])  # fmt: skip
    write("openai-tools-sequential", "openai", "model_dump(exclude_unset=True)",
          [HELLO,
           reply({"content": "Let me check.", "tool_calls": [look]}, "tool_calls").model_dump(exclude_unset=True), results[0],
           reply({"content": "", "tool_calls": [ask]}, "tool_calls").model_dump(exclude_unset=True), results[1],
           final.model_dump(exclude_unset=True)],
          finds=["Let me check", "ropes", "duplicate"])  # fmt: skip
    write("openai-tools-unanswered", "openai", dump, [HELLO, calling.model_dump(), results[0]], finds=["ropes"])
    one = reply({"content": None, "tool_calls": [look]}, "tool_calls").model_dump()
    for name, content, finds in [
        ("parts", [{"type": "text", "text": "nothing"}, {"type": "text", "text": "but ropes"}], ["ropes"]),
        ("empty", "", []),
        ("null", None, []),
        ("error", "Error: TimeoutError: the boathouse camera is offline", ["camera"]),
        ("json", json.dumps({"objects": ["hawser", {"count": 3}], "ok": True}), ["hawser"]),
    ]:
        result = {"role": "tool", "tool_call_id": "call_1", "content": content}
        write(f"openai-result-{name}", "openai", dump, [HELLO, one, result], finds=finds)
    image = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}]
    write("openai-result-image", "openai", "model_dump(), and a result of a compatible server with an image",
          [HELLO, one, {"role": "tool", "tool_call_id": "call_1", "content": image}])  # fmt: skip
    invalid = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"place": "boat'}}
    write("openai-tools-invalid-arguments", "openai", dump,
          [HELLO, reply({"content": None, "tool_calls": [invalid]}, "length").model_dump(), results[0]],
          finds=["ropes"])  # fmt: skip
    custom = {"id": "call_1", "type": "custom", "custom": {"name": "run_sql", "input": "SELECT place FROM keys"}}
    write("openai-tools-custom", "openai", dump,
          [HELLO, reply({"content": None, "tool_calls": [custom]}, "tool_calls").model_dump(),
           {"role": "tool", "tool_call_id": "call_1", "content": "the third flowerpot"}],
          finds=["flowerpot", "run_sql"])  # fmt: skip
    legacy = {"content": None, "function_call": {"name": "look", "arguments": '{"place": "boathouse"}'}}
    calling = reply(legacy, "function_call").model_dump()
    write("openai-function-call", "openai", dump, [HELLO, calling], finds=["boathouse"])
    write("openai-function-result", "openai", dump,
          [HELLO, calling, {"role": "function", "name": "look", "content": "nothing but ropes"}],
          finds=["boathouse", "ropes"])  # fmt: skip
    thought = {**call("call_1", "look", {"place": "boathouse"}),
               "extra_content": {"google": {"thought_signature": "CuQBAVSoXO4" * 9}}}  # fmt: skip
    write("openai-tools-gemini", "openai", "model_dump() of a reply of Gemini's compatible API",
          [HELLO, reply({"content": None, "tool_calls": [thought]}, "tool_calls").model_dump(), results[0]],
          finds=["boathouse", "ropes"])  # fmt: skip


def responses():
    def ask(*output):
        provider.replies.append(response(list(output)))
        answer = chat.responses.create(model="m", input="Where?")
        provider.requests.clear()
        return answer.output

    def item(name, produced, *messages, **expected):
        write(f"responses-{name}", "openai", produced, messages, **expected)

    text = {"type": "input_text", "text": "Which berth did we book?"}
    item("input-text", "input of responses.create", {"role": "user", "content": [text]}, finds=["berth"])
    item("input-message", "input of responses.create", {"type": "message", "role": "user", "content": [text]},
         finds=["berth"])  # fmt: skip
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "auto"}
    item("input-image", "input of responses.create", {"role": "user", "content": [text, image]}, finds=["berth"])
    file = {"type": "input_file", "filename": "insurance.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}
    item("input-file", "input of responses.create", {"role": "user", "content": [text, file]}, finds=["berth"])

    question = {"role": "user", "content": [text]}
    citation = {"type": "url_citation", "start_index": 0, "end_index": 4, "title": "Map", "url": "https://example.org"}
    part = {"type": "output_text", "text": "Berth twelve in Vlieland.", "annotations": [citation], "logprobs": []}
    said = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
    dump, bare = "response.output[i].model_dump()", "response.output[i].to_dict()"
    item("output-message", dump, question, ask(said)[0].model_dump(), finds=["Vlieland"])
    item("output-message-to-dict", bare, question, ask(said)[0].to_dict(), finds=["Vlieland"])
    refused = {**said, "content": [{"type": "refusal", "refusal": "I can't book the pilot."}]}
    item("output-refusal", dump, question, ask(refused)[0].model_dump(), finds=["pilot"])
    calls = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "berths", "status": "completed",
             "arguments": '{"harbour": "Vlieland"}'}  # fmt: skip
    item("function-call", dump, question, ask(calls)[0].model_dump(), rejects=("messages[1].role", "function_call"))
    output = {"type": "function_call_output", "call_id": "call_1", "output": "twelve"}
    item("function-call-output", "input of responses.create", output,
         rejects=("messages[0].role", "function_call_output"))  # fmt: skip
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Look it up."}],
               "encrypted_content": "gAAAAABo" * 12}  # fmt: skip
    item("reasoning", dump, question, ask(thought)[0].model_dump(), rejects=("messages[1].role", "reasoning"))
    searched = {"type": "web_search_call", "id": "ws_1", "status": "completed",
                "action": {"type": "search", "query": "berths", "queries": ["berths"], "sources": []}}  # fmt: skip
    item("web-search-call", dump, question, ask(searched)[0].model_dump(),
         rejects=("messages[1].role", "web_search_call"))  # fmt: skip


def claude_sent(*messages):
    """Returns messages as the Anthropic client sends them."""
    provider.replies.append(anthropic_message([{"type": "text", "text": "ok"}]))
    claude.messages.create(model="m", max_tokens=9, messages=list(messages))
    return provider.sent()


def claude_reply(*content, stop="end_turn"):
    """Returns the message that the Anthropic client makes of an answer."""
    provider.replies.append(anthropic_message(list(content), stop))
    answer = claude.messages.create(model="m", max_tokens=9, messages=[HELLO])
    provider.sent()
    return answer


def claude_users():
    def user(name, content, finds):
        write(f"anthropic-user-{name}", "anthropic", "request of messages.create",
              claude_sent({"role": "user", "content": content}), format="anthropic", finds=finds)  # fmt: skip

    text = {"type": "text", "text": "Compare this with the chart."}
    user("text", "The boat is called Petrel.", ["Petrel"])
    user("blocks", [text, {"type": "text", "text": "And with the lighthouse log."}], ["lighthouse log"])
    png = {"type": "base64", "media_type": "image/png", "data": PNG}
    user("image", [{"type": "image", "source": png}, text], ["chart"])
    url = {"type": "url", "url": "https://example.org/mast.png"}
    user("image-url", [{"type": "image", "source": url}, text], ["chart"])
    pdf = {"type": "base64", "media_type": "application/pdf", "data": PDF}
    user("pdf", [{"type": "document", "source": pdf, "title": "insurance.pdf"}, text], ["chart"])
    plain_text = {"type": "text", "media_type": "text/plain", "data": "The premium is 310 euros."}
    cited = {"type": "document", "source": plain_text, "title": "Policy", "context": "From the broker.",
             "citations": {"enabled": True}}  # fmt: skip
    user("document-text", [cited, text], ["chart", "premium"])
    blocks = {"type": "content", "content": [{"type": "text", "text": "The excess is 150 euros."}]}
    user("document-content", [{"type": "document", "source": blocks}, text], ["chart", "excess"])
    result = {"type": "search_result", "source": "https://example.org/tides", "title": "Tides",
              "content": [{"type": "text", "text": "High water at nine."}], "citations": {"enabled": True}}  # fmt: skip
    user("search-result", [result, text], ["chart", "High water"])
    user("cache-control", [{**text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}], ["chart"])
    upload = {"type": "container_upload", "file_id": "file_011CNha8iCJcU1wXNR6q4V8w"}
    user("container-upload", [upload, text], ["chart"])
    write("anthropic-blocks-in-openai-format", "anthropic", "request of messages.create, sent without format",
          claude_sent({"role": "user", "content": [text, {"type": "image", "source": png}]}),
          finds=["Compare this with the chart"])  # fmt: skip


def turn(answer, **dump):
    """Returns a reply as an application appends it to its list."""
    return {"role": answer.role, "content": [block.model_dump(**dump) for block in answer.content]}


def claude_replies():
    key = {"type": "text", "text": "Under the third flowerpot."}
    dump = '{"role": "assistant", "content": [block.model_dump() for block in message.content]}'

    def answered(name, *content, finds=("flowerpot",), hides=(), produced=dump, message=None, stop="end_turn", after=()):
        answer = message or turn(claude_reply(*content, stop=stop))
        write(f"anthropic-{name}", "anthropic", produced, [HELLO, answer, *after], format="anthropic",
              finds=["spare key", *finds], hides=hides)  # fmt: skip

    answered("reply", key)
    answered("reply-to-dict", produced="[block.to_dict() for block in message.content]",
             message={"role": "assistant", "content": [block.to_dict() for block in claude_reply(key).content]})  # fmt: skip
    answered("reply-to-param", produced="message.to_param()", message=plain(claude_reply(key).to_param()))
    answered("reply-message-dump", produced="message.model_dump()", message=claude_reply(key).model_dump())
    answered("reply-empty", finds=())
    look = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"place": "boathouse", "since": 1.50}}
    ask = {"type": "tool_use", "id": "toolu_2", "name": "ask_neighbour", "input": {}}

    def result(content=None, id="toolu_1", **fields):
        content = {} if content is None else {"content": content}
        return {"type": "tool_result", "tool_use_id": id, **content, **fields}

    def results(*blocks):
        return claude_sent({"role": "user", "content": list(blocks)})

    sentence = {"type": "text", "text": "nothing but ropes"}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    both = results(result("nothing but ropes"), result("He has the duplicate.", "toolu_2"))
    answered("tools-parallel", {"type": "text", "text": "Let me check."}, look, ask, stop="tool_use", after=both,
             finds=["Let me check", "boathouse", "ropes", "duplicate"])  # fmt: skip
    for name, block, finds in [
        ("text", result("nothing but ropes"), ["ropes"]),
        ("blocks", result([sentence, image]), ["ropes"]),
        ("empty", result(), []),
        ("error", result("TimeoutError: the camera is offline", is_error=True), ["camera"]),
        ("cache-control", result([sentence], cache_control={"type": "ephemeral"}), ["ropes"]),
    ]:
        answered(f"result-{name}", look, stop="tool_use", after=results(block), finds=["boathouse", *finds])
    and_text = results(result("nothing but ropes"), {"type": "text", "text": "Hurry, the ferry leaves."})
    answered("result-and-text", look, stop="tool_use", after=and_text, finds=["ropes", "ferry"])
    thought = {"type": "thinking", "thinking": "Recall the gardening talk.", "signature": "ErUBCkYIBxgCIkA" * 8}
    redacted = {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix" * 6}
    answered("thinking", thought, key, hides=["gardening talk"])
    answered("thinking-redacted", redacted, key)
    answered("thinking-tools", thought, look, stop="tool_use", after=results(result("nothing but ropes")),
             finds=["boathouse", "ropes"], hides=["gardening talk"])  # fmt: skip

    page = {"type": "page_location", "cited_text": "third flowerpot", "document_index": 0, "document_title": "Notes",
            "start_page_number": 1, "end_page_number": 2, "file_id": None}  # fmt: skip
    answered("citations-page", {**key, "citations": [page]})
    character = {"type": "char_location", "cited_text": "third flowerpot", "document_index": 0, "document_title": None,
                 "start_char_index": 0, "end_char_index": 15, "file_id": None}  # fmt: skip
    answered("citations-char", {**key, "citations": [character]})
    search = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "flowerpots"}}
    hit = {"type": "web_search_result", "url": "https://example.org/pots", "title": "Pots",
           "encrypted_content": "EqgfCioIARgBIiQ3" * 9, "page_age": None}  # fmt: skip
    location = {"type": "web_search_result_location", "url": hit["url"], "title": "Pots", "cited_text": "third",
                "encrypted_index": "Eo8BCioIAhgBIiQy"}  # fmt: skip
    found = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [hit]}
    answered("web-search", search, found, {**key, "citations": [location]})
    failed = {**found, "content": {"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"}}
    answered("web-search-error", search, failed, key)
    run = {"type": "server_tool_use", "id": "srvtoolu_2", "name": "bash_code_execution", "input": {"command": "ls"}}
    printed = {"type": "bash_code_execution_result", "stdout": "keys.csv\n", "stderr": "", "return_code": 0, "content": []}
    ran = {"type": "bash_code_execution_tool_result", "tool_use_id": "srvtoolu_2", "content": printed}
    answered("code-execution", run, ran, key)
    fetched = {"type": "web_fetch_result", "url": "https://example.org/pots", "retrieved_at": "2026-05-03T09:00:00Z",
               "content": {"type": "document", "title": None, "citations": None,
                           "source": {"type": "text", "media_type": "text/plain", "data": "All about pots."}}}  # fmt: skip
    answered("web-fetch", {**search, "name": "web_fetch", "input": {"url": fetched["url"]}},
             {"type": "web_fetch_tool_result", "tool_use_id": "srvtoolu_1", "content": fetched}, key)  # fmt: skip
    mcp = {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "echo", "server_name": "garden", "input": {"x": 1}}
    echoed = {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1", "is_error": False,
              "content": [{"type": "text", "text": "one"}]}  # fmt: skip
    provider.replies.append(anthropic_message([mcp, echoed, key]))
    beta = claude.beta.messages.create(model="m", max_tokens=9, messages=[HELLO], betas=["mcp-client-2025-11-20"])
    provider.sent()
    answered("mcp", message=turn(beta), produced=f"beta: {dump}")


if __name__ == "__main__":
    users()
    replies()
    tools()
    responses()
    claude_users()
    claude_replies()
