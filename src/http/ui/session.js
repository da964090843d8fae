// The page of a session: its state, its actions, and the tabs with the views.

import { get, path, poll, request } from "./api.js";
import { contextTab } from "./context.js";
import { announce, attempt, button, bytes, count, dialog, errorBox, facts, h, number, replace, time } from "./dom.js";
import { dryRunTab } from "./dry_run.js";
import { historyTab } from "./history.js";
import { memoryLink } from "./memory.js";
import { revisionsTab } from "./revisions.js";
import { sessionLink } from "./sessions.js";
import { timelineTab } from "./timeline.js";

/** The tabs by the third segment of the route. Each fills a panel and may return `update` for a changed session. */
const TABS = {
  history: { title: "History", view: historyTab },
  context: { title: "Next context", view: contextTab },
  timeline: { title: "Timeline", view: timelineTab },
  summary: { title: "Summary", view: revisionsTab },
  next: { title: "Dry run", view: dryRunTab },
};

export async function sessionView({ main, segments, query, signal }) {
  const id = segments[1];
  const tab = TABS[segments[2]] ?? TABS.history;
  const base = path("sessions", id);
  let session = await get(base, {}, signal);
  let view;
  const state = h("div", { class: "state" });
  const problem = h("div");
  const link = ([name, { title }]) =>
    h("a", { href: sessionLink(id, name), "aria-current": TABS[name] === tab && "page" }, title);
  const panel = h("section", { "aria-labelledby": "tab-title" });
  main.replaceChildren(
    h("h1", { tabindex: "-1" }, id),
    state, actions(), problem,
    h("nav", { class: "tabs", "aria-label": "Session" }, Object.entries(TABS).map(link)),
    h("h2", { id: "tab-title" }, tab.title), panel);
  replace(state, stateFacts(session));
  document.title = `${id} · precis`;
  const shown = session;
  view = await tab.view({ panel, session, base, query, signal, reload });
  // An action can change the session while the tab loads.
  if (session !== shown) await view?.update?.(session);
  poll(refresh, signal);

  /** Loads the session again and shows what has changed. */
  async function reload() {
    const next = await get(base, {}, signal);
    if (JSON.stringify(next) === JSON.stringify(session)) return;
    const added = next.last_seq - session.last_seq;
    session = next;
    replace(state, stateFacts(session));
    announce(added > 0 ? `${count(added, "new message")}.` : "The session was updated.");
    await view?.update?.(session);
  }

  async function refresh() {
    try {
      await reload();
      if (problem.dataset.source === "poll") replace(problem);
    } catch (error) {
      if (signal.aborted) return;
      problem.dataset.source = "poll";
      replace(problem, errorBox(error));
    }
  }

  function actions() {
    const consolidate = button("Consolidate now", () => attempt(consolidate, problem, async () => {
      problem.dataset.source = "action";
      try {
        const revision = await request("POST", `${base}/consolidations`);
        announce(revision ? `Revision ${revision.revision} covers the messages up to ${revision.cursor}.` : "There is nothing to summarise.");
        if (!revision) replace(problem, h("p", { class: "note" }, "There is nothing to summarise."));
      } finally {
        // A failure changes the state of the session, too.
        await reload();
      }
    }));
    const erase = button("Erase session…", async () => {
      const content = h("p", null, `All ${count(session.message_count, "message")}, the summary and its revisions are removed permanently. `,
        "Forks of the session and the memory document of its user remain.");
      const run = () => request("DELETE", base);
      if (await dialog({ title: "Erase session", content, action: "Erase", danger: true, match: id, run })) location.hash = "#/sessions";
    }, { class: "danger" });
    return h("div", { class: "actions" }, consolidate, erase);
  }
}

function stateFacts(session) {
  const { consolidation, summary, tokens } = session;
  const running = { idle: "idle", running: "running", waiting: "waiting for the next attempt" }[consolidation.state];
  return [
    facts([
      ["Messages", `${number(session.message_count)} (${bytes(session.stored_bytes)}, ${count(tokens.history, "token")})`],
      ["Tail", `${count(session.tail_messages, "message")}, ${count(tokens.tail, "token")}`],
      ["Summary", summary.revision > 0
        ? `revision ${summary.revision}, ${count(summary.words, "word")}, ${count(tokens.summary, "token")}` : "none"],
      ["User", session.user_id === null ? "none" : h("a", { href: memoryLink(session.user_id) }, session.user_id)],
      ["Consolidation", running],
      ["Last activity", time(session.updated_at)],
      session.forked_from && ["Forked from", h("a", { href: sessionLink(session.forked_from.session_id) }, session.forked_from.session_id)],
    ]),
    consolidation.failures > 0 && h("div", { class: "error" },
      h("strong", null, `Consolidation failed ${consolidation.failures === 1 ? "once" : `${number(consolidation.failures)} times`}`),
      h("p", null, consolidation.last_failure ?? ""),
      consolidation.retry_at && h("p", null, "Next attempt: ", time(consolidation.retry_at))),
  ];
}
