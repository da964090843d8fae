// The summary of a session, its revisions, and their differences.

import { get, list, request } from "./api.js";
import { sideBySide } from "./diff.js";
import { announce, attempt, button, count, dialog, facts, field, h, milliseconds, number, replace, table, time } from "./dom.js";
import { textBlock } from "./messages.js";
import { sessionLink } from "./sessions.js";

/** The most revisions that are loaded: each contains a whole summary. */
const MOST = 200;

const COLUMNS = [
  { name: "Revision" },
  { name: "Kind" },
  { name: "Messages" },
  { name: "Words", class: "number" },
  { name: "Tokens", class: "number" },
  { name: "Model" },
  { name: "Duration", class: "number" },
  { name: "Time" },
  { name: "Action" },
];

/** The state before the first revision. */
const NONE = { revision: 0, kind: null, text: "", words: 0, tokens: 0, cursor: 0 };

/** Returns the change that a revision made, in words. */
export function kindOf({ kind, meta, redacted_seq: redacted }) {
  const name = kind === "consolidation" && meta ? "consolidation, compressed" : kind;
  return redacted === null || redacted === undefined ? name : `${name}, text redacted`;
}

export const rangeOf = ({ from_seq: from, to_seq: to, cursor }) =>
  from === null ? `up to ${number(cursor)}` : from === to ? number(from) : `${number(from)} to ${number(to)}`;

/** Returns the model calls of a revision: `small, 1,200 + 80 tokens`. */
export const usageOf = ({ model, usage }) => callsOf(model === null ? [] : [model], usage);

/** Returns the calls of models in words. */
export function callsOf(models, usage) {
  if (models.length === 0) return "–";
  const { input_tokens: input, output_tokens: output, failures } = usage;
  const tokens = input === null ? "" : `, ${number(input)} + ${number(output)} tokens`;
  return `${models.join(", ")}${tokens}${failures > 0 ? `, ${count(failures, "failed call")}` : ""}`;
}

/** Returns the sentences of a summary with their messages, and marks those to check. */
function sourceNodes({ revision, sentences, compared_from_seq: from, cursor, is_complete: isComplete }, session) {
  const unsupported = sentences.filter(({ supported }) => !supported).length;
  const match = ({ kind, score, supported }) =>
    kind === "exact" ? h("span", { class: "badge" }, "exact")
      : h("span", { class: supported ? "badge" : "badge bad" }, `${supported ? "best match" : "unsupported"}, ${Math.round(score * 100)} %`);
  const item = (sentence) =>
    h("li", { class: sentence.supported ? null : "unsupported" }, h("span", { class: "text" }, sentence.text), " ",
      sentence.seq === null ? "no message" : h("a", { href: sessionLink(session, "history", `?seq=${sentence.seq}`) }, `message ${number(sentence.seq)}`),
      match(sentence));
  const result = unsupported === 0 ? "Each sentence has a source." : `${count(unsupported, "sentence")} without support: check ${unsupported === 1 ? "it" : "them"}.`;
  const compared = from === null ? "" : ` Compared with the messages ${number(from)} to ${number(cursor)}.`;
  return [h("h3", null, `Sources of revision ${revision}`),
    h("p", null, sentences.length > 0 ? `${result}${compared}` : "The summary has no sentences."),
    h("ol", { class: "sources" }, sentences.map(item)),
    !isComplete && h("p", { class: "muted" }, "The summary was compared only in part.")];
}

export async function revisionsTab({ panel, session, base, query, signal, reload }) {
  const problem = h("div");
  const current = h("div");
  const sources = h("div");
  const before = h("select", { onchange: () => showDifferences() });
  const after = h("select", { onchange: () => showDifferences() });
  const differences = h("div");
  const all = h("div");
  panel.replaceChildren(current, sources, problem, all, h("h3", null, "Compare"),
    h("div", { class: "bar" }, field("Before", before), field("After", after)), differences);
  /** Newest first. */
  let revisions = [];

  const find = (number) => revisions.find(({ revision }) => revision === Number(number)) ?? NONE;

  async function load() {
    const { items, complete } = await list(`${base}/revisions`, { most: MOST, signal });
    revisions = items;
    const newest = revisions[0] ?? NONE;
    replace(current, h("h3", null, "Current summary"), newest.text ? textBlock(newest.text) : h("p", null, "There is no summary."),
      newest.cursor > 0 && h("div", { class: "actions" }, button("Edit…", () => editSummary(newest)), newest.text && sourcesButton(newest)));
    replace(sources);
    const row = (revision) => [
      number(revision.revision), kindOf(revision), rangeOf(revision), number(revision.words), number(revision.tokens), usageOf(revision),
      milliseconds(revision.duration_ms), time(revision.created_at), restoreButton(revision, newest),
    ];
    const rows = revisions.map(row);
    if (revisions.length > 0 && complete) rows.push(["0", "no summary", "–", "0", "0", "–", "–", "–", restoreButton(NONE, newest)]);
    replace(all, h("h3", null, "Revisions"), rows.length > 0 ? table("Revisions", COLUMNS, rows) : h("p", null, "There are no revisions."),
      !complete && h("p", { class: "muted" }, `Only the newest ${number(MOST)} revisions are shown.`));
    const option = ({ revision, kind }) => h("option", { value: `${revision}` }, revision === 0 ? "0: no summary" : `${revision}: ${kind}`);
    const options = () => [...revisions, NONE].map(option);
    const [chosenBefore, chosenAfter] = [before.value || query.get("before"), after.value || query.get("after")];
    before.replaceChildren(...options());
    after.replaceChildren(...options());
    before.value = `${find(chosenBefore ?? newest.revision - 1).revision}`;
    after.value = `${find(chosenAfter ?? newest.revision).revision}`;
    showDifferences();
  }

  function showDifferences() {
    const [old, young] = [find(before.value), find(after.value)];
    const title = (revision) => `Revision ${revision.revision}`;
    const change = young.tokens - old.tokens;
    replace(differences,
      facts([
        ["Tokens", `${number(old.tokens)} → ${number(young.tokens)} (${change > 0 ? "+" : ""}${number(change)})`],
        ["Words", `${number(old.words)} → ${number(young.words)}`],
        ["Covers messages up to", `${number(old.cursor)} → ${number(young.cursor)}`],
      ]),
      sideBySide(4, [title(old), old.text], [title(young), young.text]),
      young.meta && [h("h4", null, `Compression of revision ${young.revision}`),
        sideBySide(4, ["Before the compression", young.meta.text_before], ["After the compression", young.text])]);
  }

  /** Returns a button that shows the message behind each sentence. */
  function sourcesButton({ revision }) {
    const show = button("Show sources", () => attempt(show, problem, async () => {
      const found = await get(`${base}/revisions/${revision}/sources`, {}, signal);
      replace(sources, sourceNodes(found, session.session_id));
    }));
    return show;
  }

  /** Stores an edited summary as a new revision, unless another one was stored meanwhile. */
  async function editSummary({ revision, text, cursor }) {
    const edited = h("textarea", { rows: "14" }, text);
    const content = [h("p", null, `The text takes the place of the messages up to ${number(cursor)}. Earlier revisions remain.`), field("New summary", edited)];
    const run = () => request("POST", `${base}/revisions`, { body: { summary: edited.value, based_on: revision } });
    if (!(await dialog({ title: "Edit the summary", content, action: "Save as a new revision", run }))) return;
    announce("The summary was stored as a new revision.");
    [before.value, after.value] = ["", ""];
    await load();
    await reload();
  }

  function restoreButton(revision, newest) {
    const { revision: value, redacted_seq: redacted } = revision;
    if (value === newest.revision) return h("span", { class: "muted" }, "current");
    if (redacted !== null && redacted !== undefined) return h("span", { class: "muted" }, "text redacted");
    const restore = async () => {
      const covered = revision.cursor > 0 ? `covers the messages up to ${number(revision.cursor)}` : "is empty";
      const content = h("p", null, `The summary of revision ${value} ${covered}. Restoring adds a new revision: the history is unchanged, and the `,
        "messages after it can be summarised again.");
      const run = () => request("POST", `${base}/revisions/${value}/restore`);
      if (!(await dialog({ title: `Restore revision ${value}`, content, action: "Restore", run }))) return;
      announce(`Revision ${value} was restored.`);
      [before.value, after.value] = ["", ""];
      await load();
      await reload();
    };
    return button("Restore…", restore, { class: "small", "aria-label": `Restore revision ${value}…`, "data-key": `restore-${value}` });
  }

  await load();
  let shown = session.summary.revision;
  return {
    async update(next) {
      if (next.summary.revision === shown) return;
      shown = next.summary.revision;
      [before.value, after.value] = ["", ""];
      await load();
    },
  };
}
