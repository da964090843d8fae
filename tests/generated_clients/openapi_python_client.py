"""A round trip with the client that openapi-python-client generates."""

from precis_client import AuthenticatedClient
from precis_client.api.search import search
from precis_client.api.sessions import get_session, list_messages, record_exchange
from precis_client.api.summaries import consolidate, list_revisions
from precis_client.api.users import read_memory, write_memory
from precis_client.models.content_part import ContentPart
from precis_client.models.exchange_response import ExchangeResponse
from precis_client.models.memory_document import MemoryDocument
from precis_client.models.memory_request import MemoryRequest
from precis_client.models.messages_exchange import MessagesExchange
from precis_client.models.problem import Problem
from precis_client.models.question_and_answer import QuestionAndAnswer
from precis_client.models.revision import Revision
from precis_client.models.revision_page import RevisionPage
from precis_client.models.search_hit_page import SearchHitPage
from precis_client.models.stored_message_page import StoredMessagePage
from precis_client.types import UNSET, Unset
from turn import SESSION, USER, exchange, key, url

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

consolidated = consolidate.sync_detailed(SESSION, client=client)
revision = consolidated.parsed
assert consolidated.status_code == 201 and isinstance(revision, Revision), consolidated
assert (revision.revision, revision.kind) == (1, "consolidation"), revision
revisions = list_revisions.sync(SESSION, client=client)
assert isinstance(revisions, RevisionPage) and revisions.items == [revision], revisions

found = search.sync(client=client, q="ferry", session_id=SESSION, role="user")
assert isinstance(found, SearchHitPage), found
assert [hit.message.to_dict() for hit in found.items] == [exchange[0]], found

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
