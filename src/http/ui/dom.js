// Elements, formats and dialogs. All text becomes a text node, so that text of messages is never interpreted as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Returns an element. `on…` are listeners, `style` is an object, `false` and null leave an attribute out. */
export function h(name, properties, ...children) {
  return build(document.createElement(name), properties, children);
}

/** Returns an SVG element. */
export function svg(name, properties, ...children) {
  return build(document.createElementNS(SVG, name), properties, children);
}

function build(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    // The content security policy permits styles through this object, and no attribute `style`.
    else if (name === "style") for (const [rule, text] of Object.entries(value)) element.style.setProperty(rule, text);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Replaces the children of an element. The focus and the scroll positions stay on the elements with the same `data-key`. */
export function replace(element, ...children) {
  const focused = element.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const scrolled = [...element.querySelectorAll(".scroll[data-key]")].filter(({ scrollLeft }) => scrollLeft !== 0);
  const positions = scrolled.map(({ dataset, scrollLeft }) => [dataset.key, scrollLeft]);
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  const find = (key) => element.querySelector(`[data-key="${CSS.escape(key)}"]`);
  for (const [key, position] of positions) find(key)?.scrollTo(position, 0);
  if (focused !== undefined) find(focused)?.focus({ preventScroll: true });
}

const integer = new Intl.NumberFormat("en");
const dateTime = new Intl.DateTimeFormat("en", { dateStyle: "medium", timeStyle: "medium" });

export const number = (value) => (value === null || value === undefined ? "–" : integer.format(value));

/** Returns a number with its noun: `1 message`, `2 messages`. */
export const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) (value /= 1000), (unit += 1);
  return `${value.toLocaleString("en", { maximumFractionDigits: value < 10 && unit > 0 ? 1 : 0 })} ${units[unit]}`;
}

export const milliseconds = (value) =>
  value === null || value === undefined ? "–" : value < 1000 ? `${integer.format(value)} ms` : `${(value / 1000).toFixed(1)} s`;

export const price = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });

export const time = (value) =>
  value ? h("time", { datetime: value }, dateTime.format(new Date(value))) : document.createTextNode("–");

let fields = 0;

/** Returns a label with its control. */
export function field(label, control) {
  control.id = `field-${(fields += 1)}`;
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control);
}

export const button = (label, onclick, properties) => h("button", { type: "button", onclick, ...properties }, label);

/** Returns names with their values. */
export const facts = (entries) =>
  h("dl", { class: "facts" }, entries.filter(Boolean).map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))));

/** Returns a table in a region that scrolls on small screens. Cells are texts or elements. */
export function table(label, columns, rows) {
  const head = columns.map((column) => h("th", { scope: "col", class: column.class }, column.name ?? column));
  const row = (cells) =>
    h("tr", null, cells.map((cell, index) =>
      h(index === 0 ? "th" : "td", { scope: index === 0 && "row", class: columns[index].class }, cell)));
  return h("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0", "data-key": `table ${label}` },
    h("table", null, h("thead", null, h("tr", null, head)), h("tbody", null, rows.map(row))));
}

/** Returns an error with the text of the service. */
export function errorBox(error) {
  const fields = (error.problem?.errors ?? []).map(({ field, detail }) => h("li", null, `${field}: ${detail}`));
  return h("div", { class: "error", role: "alert" }, h("strong", null, error.title ?? "Error"), h("p", null, error.message),
    fields.length > 0 && h("ul", null, fields));
}

/** Tells screen readers, and shows for a moment, that something happened. */
export function announce(text) {
  document.getElementById("status").textContent = text;
}

/** Runs the function of a button. The button is disabled meanwhile, and an error is shown in `place`. */
export async function attempt(trigger, place, run) {
  trigger.disabled = true;
  replace(place);
  try {
    return await run();
  } catch (error) {
    if (error.name !== "AbortError") replace(place, errorBox(error));
    return undefined;
  } finally {
    trigger.disabled = false;
  }
}

let dialogs = 0;

/**
 * Shows a dialog and runs `run` when its action is confirmed. Errors are shown in the dialog, which stays open.
 * If `match` is given, it has to be typed first. Returns true if `run` succeeded.
 */
export function dialog({ title, content, action, danger, match, run }) {
  return new Promise((resolve) => {
    const id = `dialog-${(dialogs += 1)}`;
    const errors = h("div");
    const typed = match && h("input", { type: "text", autocomplete: "off", spellcheck: "false", oninput: check });
    const confirm = h("button", { type: "submit", class: danger ? "danger" : "primary" }, action);
    let succeeded = false;
    function check() {
      confirm.disabled = Boolean(match) && typed.value !== match;
    }
    const submit = async (event) => {
      event.preventDefault();
      const done = await attempt(confirm, errors, async () => (await run(), true));
      if (!done) return;
      succeeded = true;
      element.close();
    };
    const form = h("form", { onsubmit: submit }, h("h2", { id }, title), content,
      match && field(`Type ${match} to confirm`, typed), errors,
      h("div", { class: "actions" }, confirm, button("Cancel", () => element.close())));
    const element = h("dialog", { "aria-labelledby": id }, form);
    element.addEventListener("close", () => (element.remove(), resolve(succeeded)));
    document.body.append(element);
    check();
    element.showModal();
  });
}
