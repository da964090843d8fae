// Chromium for the tests of the inspector: pages that fail a test on every error, and checks with axe.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const packages = createRequire(join(process.env.PRECIS_UI_NODE, "package.json"));
const { chromium } = packages("playwright-core");
const axeSource = readFileSync(packages.resolve("axe-core/axe.min.js"), "utf8");

/** Longer than any condition takes on a busy machine. */
const PATIENCE = 30_000;

export const DESKTOP = { width: 1280, height: 900 };
export const PHONE = { width: 360, height: 740 };
export const NARROW = { width: 320, height: 640 };

/** Starts Chromium. It reaches loopback only, and starts none of its own requests. */
export const launch = () =>
  chromium.launch({
    executablePath: process.env.PRECIS_UI_CHROMIUM,
    args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
      "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--no-proxy-server"],
  });

/** A tab at one service. It fails if the page logs an error, shows a dialog of a script, or leaves the service. */
export class Tab {
  static async open(browser, url, { viewport = DESKTOP, colorScheme = "light", expected = [] } = {}) {
    const context = await browser.newContext({ viewport, colorScheme, reducedMotion: "reduce" });
    context.setDefaultTimeout(PATIENCE);
    await context.grantPermissions(["clipboard-read", "clipboard-write"], { origin: url });
    const tab = new Tab(context, await context.newPage(), url, expected);
    await tab.watch();
    Tab.latest = tab;
    return tab;
  }

  /** Prints what the tab shows and what it reported, for a task that failed. */
  async describe() {
    console.error(`${this.page.url()}\n${this.problems.join("\n")}`);
    if (!this.page.isClosed()) console.error((await this.page.locator("body").innerText()).slice(0, 3000));
  }

  constructor(context, page, url, expected) {
    Object.assign(this, { context, page, url, expected, problems: [] });
  }

  async watch() {
    const { page } = this;
    // Errors that the test causes on purpose are in `expected`.
    const report = (text) => this.expected.some((known) => text.includes(known)) || this.problems.push(text);
    page.on("console", (message) => ["error", "warning"].includes(message.type()) && report(`console: ${message.text()}`));
    page.on("pageerror", (error) => report(`exception: ${error.stack}`));
    page.on("dialog", (dialog) => (report(`dialog: ${dialog.message()}`), dialog.dismiss()));
    page.on("request", (request) => request.url().startsWith(this.url) || report(`request: ${request.url()}`));
  }

  /** Opens a route of the inspector. The page before is closed, so that nothing of it is mistaken for the new one. */
  async goto(route) {
    await this.page.goto("about:blank");
    await this.page.goto(`${this.url}/ui/#${route}`);
  }

  /** Waits for a heading of the page. */
  async heading(name, level = 1) {
    await this.page.getByRole("heading", { name, level, exact: true }).waitFor();
  }

  async click(name, role = "button") {
    await this.page.getByRole(role, { name, exact: true }).click();
  }

  async fill(label, text) {
    await this.page.getByLabel(label, { exact: true }).fill(text);
  }

  /** Waits until an element with this text is visible. */
  async see(text, scope = this.page) {
    await scope.getByText(text).first().waitFor();
  }

  /** Waits until the function returns true in the page. */
  async until(condition, argument) {
    await this.page.waitForFunction(condition, argument);
  }

  /** Asserts that the page has no violation of axe's rules and does not scroll sideways. */
  async checkAccessibility(name) {
    // The policy of the page permits no script from outside, so the debugger evaluates it.
    await this.page.evaluate(axeSource);
    const violations = await this.page.evaluate(async () => {
      const { violations } = await axe.run(document, { resultTypes: ["violations"] });
      return violations.map(({ id, help, nodes }) => ({ id, help, nodes: nodes.slice(0, 3).map(({ html, failureSummary }) => ({ html, failureSummary })) }));
    });
    assert.deepEqual(violations, [], `axe: ${name}`);
    const overflow = await this.page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
    assert.ok(overflow <= 0, `${name} scrolls ${overflow} px sideways`);
  }

  async close() {
    await this.context.close();
    assert.deepEqual(this.problems, [], "the page reported problems");
  }
}
