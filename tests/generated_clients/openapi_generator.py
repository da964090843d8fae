"""A round trip with the client that openapi-generator generates."""

from precis_api import (
    ApiClient,
    ApiException,
    Configuration,
    Content,
    ContentPart,
    ContentPartType,
    ExchangeRequest,
    MemoryRequest,
    MessagesExchange,
    Problem,
    QuestionAndAnswer,
    SearchApi,
    SessionsApi,
    StoredMessage,
    SummariesApi,
    UsersApi,
)
from precis_api.exceptions import NotFoundException, UnprocessableEntityException
from turn import SESSION, USER, exchange, key, url

client = ApiClient(Configuration(host=url, access_token=key))
sessions, summaries, users, search = SessionsApi(client), SummariesApi(client), UsersApi(client), SearchApi(client)


def problem(error: ApiException) -> Problem:
    assert error.body is not None
    found = Problem.from_json(error.body)
    assert found is not None and found.status == error.status, error
    return found


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
    content = Content([ContentPart(type=ContentPartType.TEXT, text="Thanks.")])
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
