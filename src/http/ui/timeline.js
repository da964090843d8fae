// The tail of a session over its history, with the revisions of the summary and failed consolidations as marks.

import { list } from "./api.js";
import { count, facts, h, milliseconds, number, price, replace, svg, table, time } from "./dom.js";
import { callsOf, kindOf, rangeOf, usageOf } from "./revisions.js";
import { sessionLink } from "./sessions.js";

/** The most messages, revisions and records of consolidations that are loaded. */
const MOST_MESSAGES = 5000;
const MOST_REVISIONS = 200;
const MOST_RECORDS = 400;

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [1000, 260, 50, 70, 24, 30];
/** The size of the mark of a failure. */
const CROSS = 10;

const COLUMNS = [
  { name: "Revision", class: "number" },
  { name: "At message", class: "number" },
  { name: "Outcome", class: "reason" },
  { name: "Messages" },
  { name: "Tail", class: "number" },
  { name: "Models and tokens", class: "names" },
  { name: "Cost", class: "number" },
  { name: "Duration", class: "number" },
  { name: "Time" },
];

/**
 * Returns the models, the cost and the duration of a revision, or of a consolidation that failed. Those of a record include failed
 * compressions; a revision of an import, of a fork or of an earlier release has none.
 */
function effortOf(revision, record) {
  if (!record) return { calls: usageOf(revision), cost: null, duration: revision.duration_ms };
  return { calls: callsOf(record.models, record.usage), cost: record.cost, duration: record.duration_ms };
}

/**
 * Returns the size of the tail after each event. Tokens are estimated from the sizes of the messages, because the service
 * reports them for whole sessions only.
 */
export function tailOverTime({ messages, revisions, records, complete, session }) {
  const first = messages[0]?.seq ?? 1;
  const perByte = session.stored_bytes > 0 ? session.tokens.history / session.stored_bytes : 0;
  const encoder = new TextEncoder();
  // The tokens of the messages before each position.
  const sums = [0];
  for (const { message } of messages) sums.push(sums.at(-1) + encoder.encode(JSON.stringify(message)).length * perByte);
  const tokensBetween = (cursor, last) => sums[Math.max(0, last - first + 1)] - sums[Math.max(0, cursor - first + 1)];
  const oldest = revisions.at(-1);
  let cursor = complete || !oldest ? 0 : oldest.kind === "consolidation" ? oldest.from_seq - 1 : oldest.cursor;
  let last = first - 1;
  const points = [];
  const marks = [];
  const add = () => points.push({ seq: last, messages: last - Math.max(cursor, first - 1), tokens: tokensBetween(Math.max(cursor, first - 1), last) });
  // Of equal times, the messages come first: a revision follows the messages that it covers.
  const recordOf = new Map(records.map((record) => [record.revision, record]));
  // Older ones than the loaded revisions would have no place.
  const since = complete || !oldest ? -Infinity : Date.parse(oldest.created_at);
  const failed = records.filter(({ revision, created_at: at }) => revision === null && Date.parse(at) >= since);
  const events = [
    ...messages.map((message) => ({ at: message.created_at, order: 0, seq: message.seq })),
    ...revisions.map((revision) => ({ at: revision.created_at, order: 1, seq: revision.revision, revision })),
    ...failed.map((record) => ({ at: record.created_at, order: 2, seq: record.number, record })),
  ].map((event) => ({ ...event, at: Date.parse(event.at) }));
  events.sort((a, b) => a.at - b.at || a.order - b.order || a.seq - b.seq);
  for (const { revision, record, seq } of events) {
    if (record) {
      const tail = last - Math.max(cursor, first - 1);
      marks.push({ record, seq: last, before: tail, after: tail });
      continue;
    }
    if (revision) {
      const before = last - Math.max(cursor, first - 1);
      cursor = revision.cursor;
      // An import stores messages with earlier times than its revisions had.
      last = Math.max(last, cursor);
      const record = revision.kind === "consolidation" ? recordOf.get(revision.revision) : undefined;
      marks.push({ revision, record, seq: last, before, after: last - Math.max(cursor, first - 1) });
    } else last = Math.max(last, seq);
    add();
  }
  return { points, marks, first };
}

export async function timelineTab({ panel, session, base, signal }) {
  const chart = h("div", { class: "scroll", role: "region", "aria-label": "Chart of the tail", tabindex: "0" });
  const details = h("div");
  panel.replaceChildren(chart, details);

  async function load(session) {
    const [{ items: newest }, { items: revisions, complete }, { items: records }] = await Promise.all([
      list(`${base}/messages`, { query: { order: "desc" }, most: MOST_MESSAGES, signal }),
      list(`${base}/revisions`, { most: MOST_REVISIONS, signal }),
      list(`${base}/consolidations`, { most: MOST_RECORDS, signal }),
    ]);
    const messages = newest.reverse();
    const data = tailOverTime({ messages, revisions, records, complete, session });
    replace(chart, draw(data, session));
    const row = ({ revision, record, seq, before, after }) => {
      const { calls, cost, duration } = effortOf(revision, record);
      const link = revision && h("a", {
        href: sessionLink(session.session_id, "summary", `?after=${revision.revision}&before=${revision.revision - 1}`),
        "data-key": `revision ${revision.revision}`,
      }, number(revision.revision));
      return [
        link ?? "none", number(seq), revision ? kindOf(revision) : `${record.outcome}: ${record.reason}`, revision ? rangeOf(revision) : "–",
        revision ? `${number(before)} → ${number(after)}` : number(after), calls, cost === null ? "–" : price(cost), milliseconds(duration),
        time((revision ?? record).created_at),
      ];
    };
    replace(details,
      facts([
        ["Tail now", `${count(session.tail_messages, "message")}, ${count(session.tokens.tail, "token")}`],
        ["Messages", messages.length > 0 ? `${number(messages[0].seq)} to ${number(session.last_seq)}` : "none"],
        ["Cost of consolidations", costOf(data.marks)],
      ]),
      data.marks.length > 0 ? table("Consolidations and other changes of the summary", COLUMNS, data.marks.toReversed().map(row))
        : h("p", null, "The summary has no revision yet."),
      (!complete || (messages[0]?.seq ?? 1) > 1) && h("p", { class: "muted" },
        `The timeline shows the newest ${number(MOST_MESSAGES)} messages and ${number(MOST_REVISIONS)} revisions.`));
  }

  await load(session);
  return { update: load };
}

/** Returns the sum of the known costs, and the number of consolidations with an unknown one. */
function costOf(marks) {
  const called = marks.filter(({ revision, record }) => record || revision.model !== null);
  const known = called.filter(({ record }) => record && record.cost !== null);
  const sum = known.reduce((sum, { record }) => sum + record.cost, 0);
  const unknown = called.length - known.length;
  if (unknown === 0) return called.length > 0 ? price(sum) : "none";
  return known.length > 0 ? `${price(sum)}, and ${count(unknown, "consolidation")} of unknown cost` : "unknown";
}

/** Returns the consolidations without a result in groups whose marks would overlap, each with the place of its first one. */
function failuresByPlace(marks, x) {
  const groups = [];
  for (const { revision, record, seq } of marks) {
    if (revision) continue;
    const group = groups.at(-1);
    if (group && Math.abs(x(seq) - group.left) < CROSS) Object.assign(group, { records: [...group.records, record] });
    else groups.push({ left: x(seq), records: [record] });
  }
  return groups;
}

/** Draws messages of the tail as a filled area and tokens as a line. Their scales are at the left and at the right. */
function draw({ points, marks, first }, session) {
  if (points.length === 0) return h("p", null, "The session has no messages.");
  const last = Math.max(session.last_seq, first);
  const most = (name) => Math.max(1, ...turns(points, name).map((point) => point[name]));
  const [mostMessages, mostTokens] = [most("messages"), most("tokens")];
  const x = (seq) => LEFT + ((seq - first + 1) / (last - first + 1)) * (WIDTH - LEFT - RIGHT);
  const y = (value, most) => HEIGHT - BOTTOM - (value / most) * (HEIGHT - TOP - BOTTOM);
  const line = (name, most) => turns(points, name).map((point) => `${x(point.seq).toFixed(1)},${y(point[name], most).toFixed(1)}`).join(" ");
  const text = (left, top, anchor, value, kind) => svg("text", { x: left, y: top, "text-anchor": anchor, class: kind }, value);
  const floor = HEIGHT - BOTTOM;
  const describe = (revision, record) => {
    const { calls, cost, duration } = effortOf(revision, record);
    return `${calls}${cost === null ? "" : `, cost ${price(cost)}`}, ${milliseconds(duration)}`;
  };
  const revisions = marks.filter(({ revision }) => revision);
  const shapes = revisions.map(({ revision, record, seq }) =>
    svg("g", { class: `mark ${revision.kind}` }, svg("title", null, `Revision ${revision.revision}: ${kindOf(revision)}, ${describe(revision, record)}`),
      svg("line", { x1: x(seq), x2: x(seq), y1: TOP, y2: floor }), svg("circle", { cx: x(seq), cy: TOP, r: 5 })));
  // Their crosses are below the circles of the revisions: an attempt and the one that succeeds are often at the same message.
  const failed = failuresByPlace(marks, x).map(({ left, records }) => {
    const newest = records.at(-1);
    const others = records.length > 1 ? `The newest of ${number(records.length)}: ` : "";
    return svg("g", { class: "mark failed" }, svg("title", null, `${others}${newest.outcome}, ${describe(null, newest)}: ${newest.reason}`),
      svg("line", { x1: left, x2: left, y1: TOP + 2 * CROSS, y2: floor }),
      svg("path", { d: `M${left - CROSS / 2} ${TOP + CROSS}l${CROSS} ${CROSS}m0 -${CROSS}l-${CROSS} ${CROSS}` }));
  });
  const failedCount = marks.length - revisions.length;
  const label = `Tail over messages ${number(first)} to ${number(last)}: at most ${count(mostMessages, "message")} and about ` +
    `${count(Math.round(mostTokens), "token")}; ${count(revisions.length, "revision")}` +
    `${failedCount > 0 ? ` and ${count(failedCount, "consolidation")} without a result` : ""}. The table has the figures.`;
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img", "aria-label": label },
    svg("polygon", { class: "area", points: `${x(first - 1)},${floor} ${line("messages", mostMessages)} ${x(last)},${floor}` }),
    svg("polyline", { class: "line", points: line("tokens", mostTokens) }),
    svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: floor, y2: floor }),
    shapes, failed,
    text(LEFT - 6, TOP + 5, "end", number(mostMessages), "messages-scale"), text(LEFT - 6, floor, "end", "0", "messages-scale"),
    text(WIDTH - RIGHT + 6, TOP + 5, "start", `~${number(Math.round(mostTokens))}`, "tokens-scale"),
    text(LEFT, HEIGHT - 8, "start", `message ${number(first)}`), text(WIDTH - RIGHT, HEIGHT - 8, "end", `message ${number(last)}`),
    text(LEFT, 12, "start", "messages of the tail", "messages-scale"), text(WIDTH - RIGHT, 12, "end", "tokens of the tail", "tokens-scale"));
}

/** Returns the points at which a value changes its direction, and some in between. */
function turns(points, name) {
  const step = Math.ceil(points.length / 400);
  return points.filter((point, index) => {
    const [before, after] = [points[index - 1], points[index + 1]];
    return !before || !after || index % step === 0 || Math.sign(point[name] - before[name]) !== Math.sign(after[name] - point[name]);
  });
}
