// A round trip with openapi-fetch and the types of openapi-typescript.

import assert from "node:assert/strict";
import createClient from "openapi-fetch";
import type { paths } from "./generated/openapi-typescript";
import { SESSION, USER, exchange, key, url } from "./turn";

const client = createClient<paths>({ baseUrl: url, headers: { authorization: `Bearer ${key}` } });
const session = { path: { session_id: SESSION } };
const user = { path: { user_id: USER } };

async function main() {
  const recorded = await client.POST("/sessions/{session_id}/exchanges", {
    params: session,
    body: { messages: exchange, user_id: USER, metadata: { topic: "travel" } },
  });
  assert.deepEqual([recorded.data?.first_seq, recorded.data?.last_seq], [1, 4]);
  for (const replayed of [null, "true"]) {
    const { data, response } = await client.POST("/sessions/{session_id}/exchanges", {
      params: { ...session, header: { "Idempotency-Key": "second-turn" } },
      body: { user_message: [{ type: "text", text: "Thanks." }], assistant_reply: "You're welcome." },
    });
    assert.deepEqual([data?.first_seq, response.headers.get("idempotent-replayed")], [5, replayed]);
  }

  const messages = [];
  let cursor: string | null | undefined;
  do {
    const query = { limit: 4, ...(cursor ? { cursor } : {}) };
    const page = await client.GET("/sessions/{session_id}/messages", { params: { ...session, query } });
    assert(page.data);
    messages.push(...page.data.items);
    cursor = page.data.next;
  } while (cursor);
  assert.deepEqual(messages.map(({ seq }) => seq), [1, 2, 3, 4, 5, 6]);
  assert.deepEqual(messages.slice(0, 4).map(({ message }) => message), exchange);

  const revision = await client.POST("/sessions/{session_id}/consolidations", { params: session });
  assert.equal(revision.response.status, 201);
  assert.deepEqual([revision.data?.revision, revision.data?.kind], [1, "consolidation"]);
  const revisions = await client.GET("/sessions/{session_id}/revisions", { params: session });
  assert.deepEqual(revisions.data?.items, [revision.data]);

  const search = await client.GET("/search", { params: { query: { q: "ferry", session_id: SESSION, role: "user" } } });
  assert.deepEqual(search.data?.items.map(({ message }) => message), [exchange[0]]);

  const none = await client.GET("/users/{user_id}/memory", { params: user });
  const version = none.response.headers.get("etag") ?? undefined;
  assert.deepEqual([none.data?.version, version], [0, '"0"']);
  const body = { content: "# Ada\n\n- Likes ferries.\n" };
  const written = await client.PUT("/users/{user_id}/memory", {
    params: { ...user, header: { "If-Match": version } },
    body,
  });
  assert.deepEqual([written.data?.version, written.data?.content], [1, body.content]);
  const stale = await client.PUT("/users/{user_id}/memory", {
    params: { ...user, header: { "If-Match": version } },
    body,
  });
  assert.deepEqual([stale.error?.status, stale.error?.type], [412, "urn:precis:problem:version-mismatch"]);

  const missing = await client.GET("/sessions/{session_id}", { params: { path: { session_id: "a/b" } } });
  assert.equal(missing.error?.type, "urn:precis:problem:session-not-found");
  const invalid = await client.GET("/search", { params: { query: { q: "" } } });
  assert.deepEqual(invalid.error?.errors?.map(({ field }) => field), ["q"]);
}

main().catch((error: unknown) => {
  console.error(error);
  process.exit(1);
});
