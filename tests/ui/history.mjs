// Tasks with the history of a session.

import assert from "node:assert/strict";
import { Tab } from "./browser.mjs";
import { conversation, HOSTILE, recordLongResult } from "./service.mjs";

async function readsHistoryByItsRanges({ browser, service }) {
  const tab = await Tab.open(browser, service.url);
  const { cursor } = await service.get("/sessions/large");
  await tab.goto("/sessions/large/history");
  const ribbon = tab.page.getByRole("group", { name: "Ranges of the history" });
  await ribbon.getByRole("button", { name: "Message 5,000: pending tool call" }).waitFor();
  const ranges = await ribbon.getByRole("button").evaluateAll((buttons) => buttons.map((button) => button.getAttribute("aria-label")));
  const number = (value) => value.toLocaleString("en");
  assert.deepEqual(ranges, [
    "Messages 1 to 149: summarised", "Message 150: redacted", `Messages 151 to ${number(cursor)}: summarised`,
    `Messages ${number(cursor + 1)} to 4,999: verbatim`, "Message 5,000: pending tool call",
  ]);
  await tab.see("Messages 4,951 to 5,000 of 5,000");
  assert.equal(await tab.page.locator(".message").count(), 50);
  // A click in the middle of a range shows the messages of that place.
  const range = ribbon.getByRole("button", { name: ranges[2] });
  const { width, height } = await range.boundingBox();
  await range.click({ position: { x: width / 2, y: height / 2 } });
  await tab.until(() => /^Messages 2,[0-9]{3} to/.test(document.querySelector("[role=status].muted").textContent));
  // By keyboard: the range, then the number of a message, then the buttons.
  await ribbon.getByRole("button", { name: ranges[1] }).focus();
  await tab.page.keyboard.press("Enter");
  await tab.see("Messages 150 to 199 of 5,000");
  assert.match(await tab.page.locator("#message-150").innerText(), /redacted/);
  await tab.fill("Message", "2500");
  await tab.page.keyboard.press("Enter");
  await tab.until(() => document.activeElement?.id === "message-2500");
  assert.equal(new URL(tab.page.url()).hash, "#/sessions/large/history?seq=2500");
  await tab.click("Later");
  await tab.see("Messages 2,550 to 2,599 of 5,000");
  await tab.click("Earlier");
  await tab.see("Messages 2,500 to 2,549 of 5,000");
  await tab.close();
}

async function seesOmittedMessages({ browser, service }) {
  // More than the 200 messages of consolidation.max_history_messages.
  for (const first of [1, 101, 201]) await service.append("omitted", conversation(first, 100));
  const tab = await Tab.open(browser, service.url);
  await tab.goto("/sessions/omitted");
  await tab.page.getByRole("button", { name: /^Messages 1 to 100: omitted, because more than consolidation.max_history_messages/ }).waitFor();
  // The page draws the ranges again when it gets news.
  await tab.until(() => {
    const range = document.querySelector(".range.omitted");
    return range !== null && getComputedStyle(range).backgroundImage.includes("rgb(168, 32, 26)");
  });
  await tab.close();
}

/** Asks for the place of a message, and returns the line. */
async function placeOf(tab, seq) {
  await tab.click(`Where is message ${seq}?`);
  return tab.page.locator(`#message-${seq} .place`).innerText();
}

async function seesWhereMessagesAre({ browser, service }) {
  // The summary leaves a greeting out.
  await service.append("places", conversation(1, 60).with(3, { role: "assistant", content: "Hi!" }));
  await service.consolidate("places");
  await service.call("DELETE", "/sessions/places/messages/50");
  const { sentences } = await service.get("/sessions/places/messages/2/placement");
  const tab = await Tab.open(browser, service.url);
  await tab.goto("/sessions/places/history?seq=2");
  await tab.see("Messages 2 to 51 of 60");
  const others = await Promise.all(Array.from({ length: 40 }, (_, index) => service.get(`/sessions/places/messages/${index + 1}/placement`)));
  const silent = others.find((placement) => placement.seq > 1 && placement.sentences.length === 0).seq;
  assert.equal(await placeOf(tab, 2), `Summarised by revision 1; in the summary: ${sentences.map((sentence) => `“${sentence}”`).join(" ")}`);
  assert.equal(await placeOf(tab, silent), "Summarised by revision 1; no sentence of the present summary comes from it");
  assert.equal(await placeOf(tab, 50), "Redacted");
  // By keyboard. The line follows the session, and the button keeps the focus.
  await tab.page.getByRole("button", { name: "Where is message 45?" }).focus();
  await tab.page.keyboard.press("Enter");
  await tab.page.locator("#message-45 .place").filter({ hasText: /^Verbatim$/ }).waitFor();
  await service.append("places", conversation(61, 30));
  await service.consolidate("places");
  await tab.page.locator("#message-45 .place").filter({ hasText: /^Summarised by revision/ }).waitFor();
  assert.equal(await tab.page.evaluate(() => document.activeElement.textContent), "Where?");
  await tab.checkAccessibility("places of messages");
  await tab.close();
}

async function seesThatMessagesAreMissing({ browser, keyed }) {
  await recordLongResult(keyed, "missing");
  // The window of the latest context counts.
  await keyed.post("/sessions/missing/context", { max_tokens: 1200 });
  const { sent_tokens: sent } = await keyed.get("/sessions/missing/messages/123/placement");
  const tab = await Tab.open(browser, keyed.url, { expected: ["status of 401"] });
  await tab.goto("/sessions/missing/history?seq=99");
  await tab.fill("API key", keyed.key);
  await tab.click("Use this key");
  await tab.see("Messages 99 to 144 of 144");
  assert.equal(await placeOf(tab, 99), "Omitted: they do not fit into max_tokens");
  assert.equal(await placeOf(tab, 123), `Shortened to ${sent} tokens`);
  assert.equal(await placeOf(tab, 144), "Verbatim");
  const colours = [99, 123, 144].map((seq) => tab.page.locator(`#message-${seq} .place`).evaluate((line) => getComputedStyle(line).color));
  assert.deepEqual(await Promise.all(colours), ["rgb(168, 32, 26)", "rgb(168, 32, 26)", "rgb(82, 92, 107)"]);
  await tab.close();
}

async function seesWhatCameByTheProxy({ browser, service }) {
  const extra = { precis: { proxy: true, partial: true } };
  await service.append("proxied", [{ role: "user", content: "Go on." }, { role: "assistant", content: "Once", extra }]);
  const tab = await Tab.open(browser, service.url);
  await tab.goto("/sessions/proxied/history");
  const badges = tab.page.locator(".message .badge");
  await badges.first().waitFor();
  assert.deepEqual(await badges.allTextContents(), ["by proxy", "partial"]);
  await tab.close();
}

async function findsWhereWordsAre({ browser, service }) {
  await service.append("words", conversation(1, 60));
  await service.consolidate("words");
  const tab = await Tab.open(browser, service.url, { expected: ["status of 409", "status of 422"] });
  await tab.goto("/sessions/words/history");
  await tab.see("Messages 11 to 60 of 60");
  const found = tab.page.locator(".hits li");
  const find = async (words) => {
    await tab.fill("Where is …?", words);
    await tab.page.keyboard.press("Enter");
  };
  await find("garden");
  await found.nth(4).waitFor();
  const [hit] = (await service.get("/search?q=garden&session_id=words&limit=5&neighbours=0")).items;
  assert.deepEqual([await found.count(), await found.first().locator(".place").count()], [5, 1]);
  assert.ok((await found.first().innerText()).startsWith(`Message ${hit.seq} ${hit.message.role}\n`));
  await find('"day 4"');
  await tab.page.getByRole("link", { name: "Message 4", exact: true }).click();
  await tab.until(() => document.activeElement?.id === "message-4");
  assert.match(await found.first().innerText(), /Summarised by revision 1; .*garden opens on day 4/s);
  await tab.checkAccessibility("places of words");
  await find("submarine");
  await tab.see("Nothing in this session contains these words.");
  await find("-");
  await tab.page.getByRole("alert").waitFor();
  await tab.page.route("**/search?*", (route) => route.fulfill({ status: 409, json: { title: "Search is disabled", detail: "Set search.enabled." } }));
  await find("garden");
  await tab.page.getByRole("alert").filter({ hasText: "Search is disabled" }).waitFor();
  await tab.close();
}

async function redactsMessage({ browser, service }) {
  await service.append("secrets", conversation(1, 2));
  await service.append("secrets", [{ role: "user", content: "My password is swordfish." }, { role: "assistant", content: "Noted." }]);
  const tab = await Tab.open(browser, service.url);
  await tab.goto("/sessions/secrets/history");
  await tab.click("Redact message 3…");
  await tab.page.getByRole("dialog", { name: "Redact message 3" }).waitFor();
  await tab.click("Cancel");
  assert.match(JSON.stringify(await service.get("/sessions/secrets/messages")), /swordfish/);
  await tab.click("Redact message 3…");
  await tab.click("Redact");
  await tab.page.getByRole("button", { name: "Message 3: redacted" }).waitFor();
  await tab.page.locator("#message-3").filter({ hasText: "[redacted]" }).waitFor();
  assert.equal(await tab.page.getByText("swordfish").count(), 0);
  assert.doesNotMatch(JSON.stringify(await service.get("/sessions/secrets/messages")), /swordfish/);
  await tab.close();
}

async function consolidatesSession({ browser, service }) {
  await service.append("ready", conversation(1, 60));
  const tab = await Tab.open(browser, service.url);
  await tab.goto("/sessions/ready/history");
  await tab.click("Consolidate now");
  await tab.page.getByRole("button", { name: "Messages 1 to 40: summarised" }).waitFor();
  assert.equal((await service.get("/sessions/ready")).cursor, 40);
  await tab.click("Consolidate now");
  await tab.see("There is nothing to summarise.");
  await tab.close();
}

/** The session changes before the tab has loaded the messages of the earlier state. */
async function consolidatesWhileHistoryLoads({ browser, service }) {
  await service.append("slow", conversation(1, 60));
  const tab = await Tab.open(browser, service.url);
  let load;
  const loading = new Promise((resolve) => (load = resolve));
  await tab.page.route("**/sessions/slow/messages*", async (route) => {
    await loading;
    await route.continue();
  });
  await tab.goto("/sessions/slow/history");
  await tab.click("Consolidate now");
  await tab.see("revision 1, ");
  assert.equal(await tab.page.getByRole("alert").count(), 0);
  load();
  await tab.page.getByRole("button", { name: "Messages 1 to 40: summarised" }).waitFor();
  await tab.close();
}

async function seesWhyConsolidationFailed({ browser, keyed }) {
  await keyed.append("failing", conversation(1, 60));
  const tab = await Tab.open(browser, keyed.url, { expected: ["status of 401", "status of 502", "status of 503"] });
  await tab.goto("/sessions/failing");
  await tab.fill("API key", keyed.key);
  await tab.click("Use this key");
  await tab.heading("failing");
  await tab.click("Consolidate now");
  await tab.page.getByRole("alert").filter({ hasText: "small" }).waitFor();
  await tab.see("Consolidation failed once");
  await tab.close();
}

async function erasesSession({ browser, service }) {
  await service.append("obsolete", conversation(1, 2));
  const tab = await Tab.open(browser, service.url);
  await tab.goto("/sessions/obsolete");
  await tab.click("Erase session…");
  const erase = tab.page.getByRole("button", { name: "Erase", exact: true });
  assert.ok(await erase.isDisabled());
  await tab.fill("Type obsolete to confirm", "obsolet");
  assert.ok(await erase.isDisabled());
  await tab.fill("Type obsolete to confirm", "obsolete");
  await erase.click();
  await tab.heading("Sessions");
  await assert.rejects(service.get("/sessions/obsolete"), /404/);
  await tab.close();
}

async function showsHtmlAsText({ browser, service }) {
  const tab = await Tab.open(browser, service.url, { expected: ["status of 404"] });
  await tab.goto("/sessions");
  await tab.click(HOSTILE.id, "link");
  await tab.heading(HOSTILE.id);
  await tab.see("<script>alert(3)</script>");
  const shown = await tab.page.locator("#message-48 .text").first().textContent();
  assert.equal(shown, `Answer 11: ${HOSTILE.text}`);
  await tab.page.locator("#message-48").getByText("JSON").click();
  await tab.page.locator("#message-48 pre").waitFor();
  await tab.click("Next context", "link");
  await tab.heading("Messages (openai)", 3);
  await tab.see("<script>alert(3)</script>");
  // No element of the page comes from a message.
  const forged = await tab.page.evaluate(() =>
    document.querySelectorAll("main script, main img, main iframe, main style, main svg[onload], main b").length);
  assert.equal(forged, 0);
  await tab.goto("/sessions?q=iframe");
  await tab.heading("Messages (20)", 2);
  assert.equal(await tab.page.locator("main script, main img, main iframe").count(), 0);
  await tab.close();
}

export const tasks = [
  ["read the history by its ranges", readsHistoryByItsRanges],
  ["see omitted messages", seesOmittedMessages],
  ["see where messages are", seesWhereMessagesAre],
  ["see that messages are missing", seesThatMessagesAreMissing],
  ["see what came by the proxy", seesWhatCameByTheProxy],
  ["find where words are", findsWhereWordsAre],
  ["redact a message", redactsMessage],
  ["consolidate a session", consolidatesSession],
  ["consolidate while the history loads", consolidatesWhileHistoryLoads],
  ["see why consolidation failed", seesWhyConsolidationFailed],
  ["erase a session", erasesSession],
  ["show HTML as text", showsHtmlAsText],
];
