// The columns of the tables of a gateway's page for operators.

import { count, percent, seconds } from "./admin-format.js";
import { bar, element, Table } from "./admin-table.js";

const FULL = 0.95;
const COSTS = /^cost/;
const MONEY = { minimumFractionDigits: 2, maximumFractionDigits: 2 };
const SMALL_MONEY = { maximumSignificantDigits: 3 };

/** Money as text. currency: three letters, or "". */
export function money(value, currency) {
  if (value == null) return "–";
  const form = value !== 0 && Math.abs(value) < 0.1 ? SMALL_MONEY : MONEY;
  return `${value.toLocaleString("en", form)}${currency ? ` ${currency}` : ""}`;
}

/** A button of a row. name: what it acts on, for screen readers. */
export function action(text, name, onclick, kind = "") {
  const made = element("button", kind, text);
  made.type = "button";
  made.setAttribute("aria-label", `${text} ${name}`);
  made.addEventListener("click", onclick);
  return made;
}

// drain: called with the name of a backend, and whether it is to be drained.
export function backendsTable(table, drain) {
  return new Table(table, [
    { head: "Backend", kind: "key", value: (row) => named(row.name, row.url) },
    { head: "State", value: state },
    { head: "Models", value: (row) => lines(row.models, `engine: ${row.engine}`) },
    { head: "Requests", kind: "number", value: (row) => count(row.requests) },
    { head: "Tokens of text", kind: "number", value: (row) => count(row.text_tokens) },
    { head: "Visual tokens", kind: "number", value: (row) => count(row.visual_tokens) },
    { head: "Weight", kind: "number", value: (row) => String(row.weight) },
    { head: "Breakers", value: breakers },
    { head: "Ejections", kind: "number", value: (row) => count(row.ejections) },
    { head: "Action", value: ({ name, drained_here: drained }) => action(drained ? "Undrain" : "Drain",
      `backend ${name}`, () => drain(name, !drained)) },
  ], (row) => `${row.name}/${row.drained_here}`);
}

// change: called with a row, to change its limits. It is called with the latest row of that name.
export function tenantsTable(table, currency, change) {
  return new Table(table, [
    { head: "Tenant", kind: "key", value: (row) => named(row.name, row.keys === 1 ? "1 key" : `${count(row.keys)} keys`) },
    { head: "Used of its limits", value: (row) => used(row, currency()) },
    { head: "Further settings", value: further },
    { head: "Action", value: ({ name }) => (name.includes(":") ? "set at the start"
      : action("Limits", `of ${name}`, () => change(name))) },
  ], (row) => row.name);
}

// actions: {change(fingerprint), revoke(fingerprint, name)}.
export function keysTable(table, actions) {
  return new Table(table, [
    { head: "Key of", kind: "key", value: (row) => row.name },
    { head: "Fingerprint", value: (row) => element("span", "mono", row.fingerprint) },
    { head: "Roles", value: (row) => row.roles.join(", ") },
    { head: "Refused from", value: ends },
    { head: "Action", value: ({ name, fingerprint, fixed }) => (fixed ? "set at the start" : element("span", "row",
      action("Change", `key ${fingerprint} of ${name}`, () => actions.change(fingerprint)),
      action("Revoke", `key ${fingerprint} of ${name}`, () => actions.revoke(fingerprint, name), "danger"))) },
  ], (row) => row.fingerprint);
}

// highest: returns the highest cost of a row, for the bars.
export function usageTable(table, currency, highest) {
  return new Table(table, [
    { head: "Group", kind: "key", value: (row) => row.group || "–" },
    { head: "Requests", kind: "number", value: (row) => count(row.requests) },
    { head: "Errors", kind: "number", value: (row) => count(row.errors) },
    { head: "Images", kind: "number", value: (row) => count(row.images) },
    { head: "Prompt tokens", kind: "number", value: (row) => count(row.prompt_tokens) },
    { head: "of these visual", kind: "number", value: (row) => count(row.visual_tokens) },
    { head: "of these cached", kind: "number", value: (row) => count(row.cached_tokens) },
    { head: "Answer tokens", kind: "number", value: (row) => count(row.completion_tokens) },
    { head: "Cost", value: (row) => element("span", "name", money(row.cost, currency()),
      bar(highest() > 0 ? row.cost / highest() : 0, "")) },
    { head: "Saved by caches", kind: "number", value: (row) => money(row.credit, currency()) },
  ], (row) => row.group);
}

export function armsTable(table, currency, verdicts) {
  return new Table(table, [
    { head: "Arm", kind: "key", value: (row) => named(row.variant, row.model) },
    { head: "Share", value: (row) => element("span", "name", row.copies ? `${percent(row.copies)} copies` : percent(row.share),
      bar(row.copies || row.share, "")) },
    { head: "Requests", kind: "number", value: (row) => count(row.requests) },
    { head: "Errors", kind: "number", value: (row) => percent(row.error_rate) },
    { head: "Half within", kind: "number", value: (row) => seconds(row.p50_s) },
    { head: "95 % within", kind: "number", value: (row) => seconds(row.p95_s) },
    { head: "First token", kind: "number", value: (row) => seconds(row.ttft_p50_s) },
    { head: "Cost per request", kind: "number", value: (row) => money(row.cost_per_request, currency()) },
    { head: "Rating", kind: "number", value: (row) => (row.rating == null ? "–" : `${row.rating.toFixed(2)} (${count(row.ratings)})`) },
    { head: "Verdict", value: (row) => lines([verdicts().find((each) => each.variant === row.variant)?.words ?? "baseline"]) },
  ], (row) => row.variant);
}

/** The name of a limit in words. */
export function words(name) {
  return name.replaceAll("_", " ");
}

function named(title, note) {
  return element("span", "name", title, element("small", "", note));
}

function lines(texts, note) {
  const rest = note ? [element("small", "muted", note)] : [];
  return element("span", "lines small", ...(texts.length ? texts : ["–"]).map((text) => element("span", "", text)), ...rest);
}

function state({ accepts, drained_here: drained }) {
  const { text, images } = accepts;
  const tone = (word) => (word === "yes" ? "ok" : word === "draining" || word === "busy" ? "warn" : "danger");
  const shown = (word) => (word === "yes" ? "accepts requests" : word === "draining" && drained ? "drained" : word);
  const chips = [element("span", `chip ${tone(text)}`, shown(text))];
  if (images !== text) chips.push(element("span", `chip ${tone(images)}`, `images: ${shown(images)}`));
  return element("span", "lines", ...chips);
}

function breakers(row) {
  const open = Object.entries(row.breakers).filter(([, value]) => value !== "closed");
  return lines(open.length ? open.map(([stage, value]) => `${stage}: ${value}`) : ["all closed"]);
}

function used(row, currency) {
  if (row.used === null) return "not known now";
  if (!row.used.length) return "no limits";
  return element("span", "lines", ...row.used.map(({ name, used: amount, limit }) => {
    const text = COSTS.test(name) ? `${money(amount, "")} of ${money(limit, currency)}` : `${count(amount)} of ${count(limit)}`;
    const share = amount / limit;
    return element("span", "name small", `${words(name)}: ${text}`, bar(share, share >= FULL ? "warn" : ""));
  }));
}

function further(row) {
  const counted = new Set((row.used ?? []).map(({ name }) => name));
  const rest = Object.entries(row.limits).filter(([name]) => !counted.has(name));
  return lines(rest.map(([name, value]) => `${words(name)}: ${Array.isArray(value) ? value.join(", ") : value}`));
}

function ends(row) {
  if (row.expires === null) return "never";
  const shown = row.expires.replace("T00:00:00Z", "").replace("T", " ").replace("Z", " UTC");
  return row.expired ? element("span", "chip warn", `expired ${shown}`) : shown;
}
