// The columns of the tables of the page for operators.

import { bytes, clock, count, percent, seconds } from "./admin-format.js";
import { hitRate } from "./admin-history.js";
import { bar, element, Table } from "./admin-table.js";

/** The stages of a request, in their order, and how they are shown. */
export const STAGES = {
  receive: "receive",
  fetch: "fetch",
  media_decode: "decode media",
  preprocess: "preprocess",
  queue: "queue",
  encode: "encode",
  prefill: "prefill",
  decode: "decode",
  detokenize: "detokenize",
  respond: "respond",
};
const WITHOUT_KEY = "-";
const FULL = 0.95;

/** The name of a client. Without keys, clients are not told apart. */
function caller(name) {
  return name === WITHOUT_KEY || !name ? "without key" : name;
}

export function requestsTable(table) {
  return new Table(table, [
    { head: "Request", kind: "key", value: (row) => element("span", "mono", row.id) },
    { head: "Tenant", value: (row) => caller(row.caller) },
    { head: "Stage", value: (row) => element("span", `chip ${row.stage === "generating" ? "ok" : "warn"}`, row.stage) },
    { head: "Time", kind: "number", value: (row) => seconds(row.seconds) },
    { head: "Images", kind: "number", value: (row) => count(row.images) },
    { head: "Choices", kind: "number", value: (row) => count(row.choices) },
    { head: "Tokens so far", kind: "number", value: (row) => count(row.tokens) },
  ], (row) => row.number);
}

export function cachesTable(table) {
  return new Table(table, [
    { head: "Cache", kind: "key", value: (row) => named(row.title, `${row.name} · ${row.group}`) },
    { head: "Filled", value: filling },
    { head: "Entries", kind: "number", value: (row) => count(row.entries) },
    { head: "Hit rate", kind: "number", value: (row) => percent(hitRate(row)) },
    { head: "Hits", kind: "number", value: (row) => unit(row, row.hits) },
    { head: "Misses", kind: "number", value: (row) => unit(row, row.misses) },
    { head: "Evictions", kind: "number", value: (row) => count(row.evictions) },
  ], (row) => row.name);
}

export function tenantsTable(table) {
  return new Table(table, [
    { head: "Tenant", kind: "key", value: (row) => caller(row.name) },
    { head: "In flight", kind: "number", value: (row) => count(row.in_flight) },
    { head: "Requests", kind: "number", value: (row) => count(row.requests) },
    { head: "Refused", kind: "number", value: (row) => count(row.refused) },
    { head: "Images", kind: "number", value: (row) => count(row.images) },
    { head: "Prompt tokens", kind: "number", value: (row) => count(row.prompt_tokens) },
    { head: "of these cached", kind: "number", value: (row) => count(row.cached_tokens) },
    { head: "Answer tokens", kind: "number", value: (row) => count(row.completion_tokens) },
    { head: "Share of computed tokens", value: (row) => element("span", "name", percent(row.share), bar(row.share ?? 0, "")) },
  ], (row) => row.name);
}

export function slowTable(table) {
  return new Table(table, [
    { head: "Arrived", kind: "key", value: arrival },
    { head: "Tenant", value: (row) => caller(row.caller) },
    { head: "Total", kind: "number", value: (row) => seconds(row.seconds) },
    { head: "First token", kind: "number", value: (row) => seconds(row.ttft_seconds) },
    { head: "Stages", value: stages },
    { head: "Reasons", value: (row) => lines(row.reasons) },
    { head: "Images", value: (row) => lines(row.images.map(image)) },
  ], (row) => `${row.request_id}/${row.time}`);
}

/** Fill the legend of the stages' colours. */
export function stageLegend(list) {
  for (const [name, label] of Object.entries(STAGES)) {
    const item = element("li", "");
    const swatch = element("span", `swatch stage-${name}`);
    item.append(swatch, label);
    list.append(item);
  }
}

function named(title, note) {
  return element("span", "name", title, element("small", "", note));
}

function arrival(row) {
  const trace = row.trace_id ? [element("small", "mono", `trace ${row.trace_id}`)] : [];
  return element("span", "name", clock(Date.parse(row.time) / 1000),
    element("small", "", `${row.route} · ${row.status}`), ...trace);
}

function lines(texts) {
  return element("span", "lines small", ...(texts.length ? texts : ["–"]).map((text) => element("span", "", text)));
}

function unit(row, value) {
  return value != null && row.unit === "tokens" ? `${count(value)} tokens` : count(value);
}

function filling(row) {
  if (!row.capacity_bytes) return row.bytes ? bytes(row.bytes) : "–";
  const share = row.bytes / row.capacity_bytes;
  const text = `${bytes(row.bytes)} of ${bytes(row.capacity_bytes)}`;
  return element("span", "name", text, bar(share, share >= FULL ? "warn" : ""));
}

function stages(row) {
  const entries = Object.entries(row.stages).filter(([, value]) => value > 0);
  entries.sort(([left], [right]) => order(left) - order(right));
  const whole = Math.max(row.seconds, entries.reduce((sum, [, value]) => sum + value, 0));
  const parts = element("span", "bar parts");
  parts.setAttribute("aria-hidden", "true");
  for (const [name, value] of entries) {
    const part = element("span", `fill stage-${name}`);
    part.style.width = `${((100 * value) / whole).toFixed(2)}%`;
    parts.append(part);
  }
  const longest = [...entries].sort(([, left], [, right]) => right - left).slice(0, 3);
  const text = longest.map(([name, value]) => `${STAGES[name] ?? name} ${seconds(value)}`).join(", ");
  return element("span", "name", parts, element("small", "", text || "–"));
}

function order(name) {
  const place = Object.keys(STAGES).indexOf(name);
  return place < 0 ? Object.keys(STAGES).length : place;
}

function image(row) {
  return `${row.width}×${row.height}${row.tokens == null ? "" : ` (${count(row.tokens)} tokens)`}`;
}
