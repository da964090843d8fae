"""A round trip with the client that openapi-generator generates."""

from precis_api import (
    AnthropicContext,
    AnthropicToolList,
    ApiClient,
    ApiException,
    CompleteContext,
    Configuration,
    Content,
    ContentPart,
    ContextRequest,
    ExchangeRequest,
    Fields,
    Format,
    MemoryRequest,
    MessagesExchange,
    OpenAiContext,
    OpenAiToolList,
    Problem,
    QuestionAndAnswer,
    SearchApi,
    SessionsApi,
    StoredMessage,
    SummariesApi,
    SyncRequest,
    ToolsApi,
    UsersApi,
)
from precis_api.exceptions import NotFoundException, UnprocessableEntityException
from turn import (
    SESSION,
    USER,
    anthropic_messages,
    anthropic_tools,
    exchange,
    key,
    openai_messages,
    openai_tools,
    url,
)

client = ApiClient(Configuration(host=url, access_token=key))
sessions, summaries, users, search = SessionsApi(client), SummariesApi(client), UsersApi(client), SearchApi(client)
tools = ToolsApi(client)


def problem(error: ApiException) -> Problem:
    assert error.body is not None
    found = Problem.from_json(error.body)
    assert found is not None and found.status == error.status, error
    return found


def sync_request(body: dict[str, object]) -> SyncRequest:
    request = SyncRequest.from_dict(body)
    assert request is not None
    return request


def plain(value: object) -> object:
    """The client encodes its models this way; `to_dict` leaves models in lists of a union as they are."""
    return without_nulls(client.sanitize_for_serialization(value))  # type: ignore[no-untyped-call]


def without_nulls(value: object) -> object:
    """The client adds nulls for fields that can be null."""
    if isinstance(value, dict):
        return {name: without_nulls(field) for name, field in value.items() if field is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


given = MessagesExchange.from_dict({"messages": exchange, "user_id": USER, "metadata": {"topic": "travel"}})
recorded = sessions.record_exchange(SESSION, ExchangeRequest(given))
assert (recorded.first_seq, recorded.last_seq) == (1, 4), recorded
for replayed in (None, "true"):
    content = Content([ContentPart(type="text", text="Thanks.")])
    texts = QuestionAndAnswer(user_message=content, assistant_reply=Content("You're welcome."))
    second = sessions.record_exchange_with_http_info(SESSION, ExchangeRequest(texts), "second-turn")
    assert second.data.first_seq == 5 and second.headers is not None, second
    assert second.headers.get("idempotent-replayed") == replayed, second

messages: list[StoredMessage] = []
cursor: str | None = None
while True:
    page = sessions.list_messages(SESSION, limit=4, cursor=cursor)
    messages.extend(page.items)
    cursor = page.next
    if cursor is None:
        break
assert [message.seq for message in messages] == [1, 2, 3, 4, 5, 6], messages
assert plain([message.message for message in messages[:4]]) == without_nulls(exchange), messages

# A list for one model is stored in another session, and continued there in the format of the other one.
context = sessions.build_context(SESSION).actual_instance
assert isinstance(context, OpenAiContext), context
sent = plain(context.messages)
assert isinstance(sent, list) and sent[:4] == without_nulls(exchange), sent
assert len(openai_messages.validate_python(sent)) == 6, sent
stored = sessions.sync_session("copy", sync_request({"messages": sent}))
assert (stored.matched, stored.appended) == (0, 6), stored
request = ContextRequest(format=Format.ANTHROPIC, system_prompt="Be kind.", cache_control=True)
other = sessions.build_context(SESSION, request).actual_instance
assert isinstance(other, AnthropicContext), other
system = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
assert plain(other.system) == system, other.system
sent = plain(other.messages)
assert len(anthropic_messages.validate_python(sent)) == 6, sent
# The client cannot send blocks: see docs/clients.md.
tool_use = {"type": "tool_use", "id": "call_1", "name": "timetable", "input": {"line": 3}}
assert isinstance(sent, list) and sent[1] == {"role": "assistant", "content": [tool_use]}, sent
complete = sessions.build_context(SESSION, ContextRequest(fields=Fields.ALL)).actual_instance
assert isinstance(complete, CompleteContext) and len(complete.messages) == 6, complete

openai_list = tools.list_tools().actual_instance
assert isinstance(openai_list, OpenAiToolList), openai_list
names = [tool["function"]["name"] for tool in openai_tools.validate_python(plain(openai_list.tools))]
anthropic_list = tools.list_tools(format="anthropic").actual_instance
assert isinstance(anthropic_list, AnthropicToolList), anthropic_list
assert [tool["name"] for tool in anthropic_tools.validate_python(plain(anthropic_list.tools))] == names, names

consolidated = summaries.consolidate_with_http_info(SESSION)
revision = consolidated.data
assert consolidated.status_code == 201 and (revision.revision, revision.kind) == (1, "consolidation"), revision
assert summaries.list_revisions(SESSION).items == [revision]

found = search.search("ferry", session_id=SESSION, role="user")
assert plain([hit.message for hit in found.items]) == [exchange[0]], found

none = users.read_memory_with_http_info(USER)
assert none.headers is not None
version = none.headers["etag"]
assert (none.data.version, version) == (0, '"0"'), none
document = MemoryRequest(content="# Ada\n\n- Likes ferries.\n")
written = users.write_memory(USER, document, version)
assert (written.version, written.content) == (1, document.content), written
try:
    users.write_memory(USER, document, version)
    raise AssertionError("a stale version was accepted")
except ApiException as error:
    assert problem(error).type == "urn:precis:problem:version-mismatch", error

try:
    sessions.get_session("a/b")
    raise AssertionError("an unknown session was found")
except NotFoundException as error:
    assert problem(error).type == "urn:precis:problem:session-not-found", error
try:
    search.search("")
    raise AssertionError("an empty query was accepted")
except UnprocessableEntityException as error:
    assert [field.var_field for field in problem(error).errors or []] == ["q"], error
