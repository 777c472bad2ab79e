// The stages of a request as a bar, and as a waterfall with numbers.

import { el, milliseconds } from "./dom.js";

export const STAGES = ["fetch", "media_decode", "preprocess", "queue", "encode", "prefill", "decode"];
const NAMES = {
  fetch: "Fetch", media_decode: "Decode media", preprocess: "Preprocess", queue: "Queue",
  encode: "Encode image", prefill: "Prefill", decode: "Generate",
};

// Return the stages that took time, in order: {stage, name, start, ms}; starts follow from the stages before.
export function intervals(timings) {
  let start = 0;
  return STAGES.filter((stage) => timings[stage] > 0).map((stage) => {
    const interval = { stage, name: NAMES[stage], start, ms: timings[stage] };
    start += timings[stage];
    return interval;
  });
}

// A disclosure: its summary is one bar with a part per stage, its content the waterfall.
export function stageView(timings) {
  const stages = intervals(timings);
  const total = stages.reduce((sum, { ms }) => sum + ms, 0);
  const bar = el("span", { class: "stage-bar", "aria-hidden": "true" });
  const rows = stages.map(({ stage, name, start, ms }) => {
    const part = el("span", { class: `part ${stage}` });
    part.style.flexGrow = String(ms / total);
    bar.append(part);
    const block = el("span", { class: `block ${stage}` });
    block.style.marginLeft = `${(100 * start) / total}%`;
    block.style.width = `max(2px, ${(100 * ms) / total}%)`;
    return el("tr", {},
      el("th", { scope: "row", text: name }),
      el("td", { class: "track", "aria-hidden": "true" }, block),
      el("td", { class: "number", text: milliseconds(ms) }));
  });
  const head = el("thead", { class: "visually-hidden" }, el("tr", {},
    el("th", { text: "Stage" }), el("th", { text: "When" }), el("th", { text: "Duration" })));
  return el("details", { class: "stages" },
    el("summary", {}, el("span", { class: "small", text: "Stages" }), bar,
      el("span", { class: "small number", text: milliseconds(total) })),
    el("table", { class: "waterfall" },
      el("caption", { class: "visually-hidden", text: "Stages of this request on the server" }),
      head, el("tbody", {}, rows)));
}
