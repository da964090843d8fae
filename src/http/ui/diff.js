// The differences between two texts by words, side by side.

import { h } from "./dom.js";

/** Longer texts are compared as a whole: the table of the comparison has one cell for each pair of words. */
const MOST_CELLS = 25_000_000;

const segmenter = new Intl.Segmenter("en", { granularity: "word" });

const wordsOf = (text) => Array.from(segmenter.segment(text), ({ segment }) => segment);

/** Returns the parts of two texts in order: `{kind: "same" | "removed" | "added", text}`. */
export function compare(before, after) {
  const [old, young] = [wordsOf(before), wordsOf(after)];
  let start = 0;
  while (start < old.length && start < young.length && old[start] === young[start]) start += 1;
  let end = 0;
  while (end < old.length - start && end < young.length - start && old.at(-1 - end) === young.at(-1 - end)) end += 1;
  const parts = [];
  const add = (kind, words) => {
    if (words.length === 0) return;
    if (parts.at(-1)?.kind === kind) parts.at(-1).text += words.join("");
    else parts.push({ kind, text: words.join("") });
  };
  add("same", old.slice(0, start));
  compareMiddle(old.slice(start, old.length - end), young.slice(start, young.length - end), add);
  add("same", end > 0 ? old.slice(-end) : []);
  return parts;
}

/** Finds the longest common sequence of words. */
function compareMiddle(old, young, add) {
  const width = young.length + 1;
  if (old.length === 0 || young.length === 0 || old.length * width > MOST_CELLS) {
    add("removed", old);
    add("added", young);
    return;
  }
  // The cell of a pair is the length of the longest common sequence from there to the ends.
  const lengths = new Uint16Array((old.length + 1) * width);
  for (let i = old.length - 1; i >= 0; i -= 1) {
    for (let j = young.length - 1; j >= 0; j -= 1) {
      lengths[i * width + j] = old[i] === young[j]
        ? lengths[(i + 1) * width + j + 1] + 1
        : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  let [i, j] = [0, 0];
  while (i < old.length && j < young.length) {
    if (old[i] === young[j]) (add("same", [old[i]]), (i += 1), (j += 1));
    else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) (add("removed", [old[i]]), (i += 1));
    else (add("added", [young[j]]), (j += 1));
  }
  add("removed", old.slice(i));
  add("added", young.slice(j));
}

/** Returns two columns: each text with the words that the other one lacks. Titles are headings of the given level. */
export function sideBySide(level, [titleBefore, before], [titleAfter, after]) {
  const parts = compare(before, after);
  const column = (title, changed, element) =>
    h("div", { class: "column", role: "group", "aria-label": title }, h(`h${level}`, null, title),
      h("div", { class: "text" }, parts.filter(({ kind }) => kind === "same" || kind === changed)
        .map(({ kind, text }) => (kind === "same" ? text : h(element, null, text)))));
  return h("div", { class: "columns" }, column(titleBefore, "removed", "del"), column(titleAfter, "added", "ins"));
}
