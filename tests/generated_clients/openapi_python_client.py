"""A round trip with the client that openapi-python-client generates."""

from precis_client import AuthenticatedClient
from precis_client.api.search import search
from precis_client.api.sessions import build_context, get_session, list_messages, record_exchange, sync_session
from precis_client.api.summaries import consolidate, list_revisions
from precis_client.api.tools import list_tools
from precis_client.api.users import read_memory, write_memory
from precis_client.models.anthropic_context import AnthropicContext
from precis_client.models.anthropic_tool_list import AnthropicToolList
from precis_client.models.complete_context import CompleteContext
from precis_client.models.content_part import ContentPart
from precis_client.models.context_request import ContextRequest
from precis_client.models.exchange_response import ExchangeResponse
from precis_client.models.memory_document import MemoryDocument
from precis_client.models.memory_request import MemoryRequest
from precis_client.models.messages_exchange import MessagesExchange
from precis_client.models.open_ai_context import OpenAiContext
from precis_client.models.open_ai_tool_list import OpenAiToolList
from precis_client.models.problem import Problem
from precis_client.models.question_and_answer import QuestionAndAnswer
from precis_client.models.revision import Revision
from precis_client.models.revision_page import RevisionPage
from precis_client.models.search_hit_page import SearchHitPage
from precis_client.models.stored_message_page import StoredMessagePage
from precis_client.models.sync_request import SyncRequest
from precis_client.models.sync_response import SyncResponse
from precis_client.types import UNSET, Unset
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

client = AuthenticatedClient(base_url=url, token=key)

body = MessagesExchange.from_dict({"messages": exchange, "user_id": USER, "metadata": {"topic": "travel"}})
recorded = record_exchange.sync(SESSION, client=client, body=body)
assert isinstance(recorded, ExchangeResponse) and (recorded.first_seq, recorded.last_seq) == (1, 4), recorded
for replayed in (None, "true"):
    texts = QuestionAndAnswer(user_message=[ContentPart("text", text="Thanks.")], assistant_reply="You're welcome.")
    second = record_exchange.sync_detailed(SESSION, client=client, body=texts, idempotency_key="second-turn")
    assert isinstance(second.parsed, ExchangeResponse) and second.parsed.first_seq == 5, second
    assert second.headers.get("idempotent-replayed") == replayed, second

messages = []
cursor: str | Unset | None = UNSET
while cursor is not None:
    messages_page = list_messages.sync(SESSION, client=client, limit=4, cursor=cursor)
    assert isinstance(messages_page, StoredMessagePage), messages_page
    messages.extend(messages_page.items)
    cursor = messages_page.next_
assert [message.seq for message in messages] == [1, 2, 3, 4, 5, 6], messages
assert [message.message.to_dict() for message in messages[:4]] == exchange, messages

# A list for one model is stored in another session, and continued there in the format of the other one.
context = build_context.sync(SESSION, client=client, body=ContextRequest())
assert isinstance(context, OpenAiContext), context
given = context.to_dict()["messages"]
assert given[:4] == exchange and len(openai_messages.validate_python(given)) == 6, given
stored = sync_session.sync("copy", client=client, body=SyncRequest.from_dict({"messages": given}))
assert isinstance(stored, SyncResponse) and (stored.matched, stored.appended) == (0, 6), stored
request = ContextRequest(format_="anthropic", system_prompt="Be kind.", cache_control=True)
other = build_context.sync(SESSION, client=client, body=request)
assert isinstance(other, AnthropicContext), other
assert other.to_dict()["system"] == [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}], other
given = other.to_dict()["messages"]
assert len(anthropic_messages.validate_python(given)) == 6, given
stored = sync_session.sync("copy", client=client, body=SyncRequest.from_dict({"messages": given, "format": "anthropic"}))
assert isinstance(stored, SyncResponse) and (stored.matched, stored.appended) == (6, 0), stored
complete = build_context.sync(SESSION, client=client, body=ContextRequest(fields="all"))
assert isinstance(complete, CompleteContext) and complete.to_dict()["messages"][:4] == exchange, complete

tools = list_tools.sync(client=client)
assert isinstance(tools, OpenAiToolList), tools
names = [tool["function"]["name"] for tool in openai_tools.validate_python(tools.to_dict()["tools"])]
other_tools = list_tools.sync(client=client, format_="anthropic")
assert isinstance(other_tools, AnthropicToolList), other_tools
assert [tool["name"] for tool in anthropic_tools.validate_python(other_tools.to_dict()["tools"])] == names, other_tools

consolidated = consolidate.sync_detailed(SESSION, client=client)
revision = consolidated.parsed
assert consolidated.status_code == 201 and isinstance(revision, Revision), consolidated
assert (revision.revision, revision.kind) == (1, "consolidation"), revision
revisions = list_revisions.sync(SESSION, client=client)
assert isinstance(revisions, RevisionPage) and revisions.items == [revision], revisions

found = search.sync(client=client, q="ferry", session_id=SESSION, role="user")
assert isinstance(found, SearchHitPage), found
assert [hit.message and hit.message.to_dict() for hit in found.items] == [exchange[0]], found

none = read_memory.sync_detailed(USER, client=client)
version = none.headers["etag"]
assert isinstance(none.parsed, MemoryDocument) and (none.parsed.version, version) == (0, '"0"'), none
document = MemoryRequest("# Ada\n\n- Likes ferries.\n")
written = write_memory.sync(USER, client=client, body=document, if_match=version)
assert isinstance(written, MemoryDocument) and written.version == 1, written
assert written.content == document.content, written
stale = write_memory.sync(USER, client=client, body=document, if_match=version)
assert isinstance(stale, Problem), stale
assert (stale.status, stale.type_) == (412, "urn:precis:problem:version-mismatch"), stale

missing = get_session.sync("a/b", client=client)
assert isinstance(missing, Problem) and missing.type_ == "urn:precis:problem:session-not-found", missing
invalid = search.sync(client=client, q="")
assert isinstance(invalid, Problem) and not isinstance(invalid.errors, Unset), invalid
assert [error.field for error in invalid.errors] == ["q"], invalid
