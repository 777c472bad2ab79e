// One message as elements: a question with its media, or an answer with what is known about it.

import { el, iconButton, milliseconds } from "./dom.js";
import { codeBlock, markdown } from "./markdown.js";
import { stageView } from "./stages.js";
import { thumbnail, videoView } from "./viewer.js";

// actions: {edit, again, copy, beside(node, step)}. siblings: the versions of this message.
export function questionView(node, siblings, actions, media) {
  return el("article", { class: "message question", "data-id": node.id },
    el("h2", { class: "who", text: "You" }),
    node.media.length ? el("div", { class: "pictures" }, media) : null,
    node.text ? el("div", { class: "text", text: node.text }) : null,
    el("div", { class: "actions" },
      versions(node, siblings, actions),
      iconButton("edit", "Edit this question", () => actions.edit(node))));
}

// Returns {view, text, live}: the element, the container of the text, and a line for what happens now.
export function answerView(node, siblings, actions, name) {
  const text = el("div", { class: "text" });
  const live = el("div", { class: "live small muted number" });
  const view = el("article", { class: "message answer", "data-id": node.id, "data-state": node.state },
    el("h2", { class: "who", text: name }), text, live);
  if (node.state === "streaming") return { view, text, live };
  text.append(answerContent(node));
  live.remove();
  if (node.state === "error") view.append(el("p", { class: "notice danger", role: "alert", text: node.error }));
  return { view, text, live };
}

// What a finished answer reports. pictures: thumbnails with relevance, or [].
export function answerFooter(node, siblings, actions, pictures) {
  const footer = el("div", { class: "report" });
  if (pictures.length) footer.append(el("div", { class: "pictures" }, pictures));
  const facts = answerFacts(node);
  if (facts.length) footer.append(el("div", { class: "facts" }, facts));
  if (node.timings) footer.append(stageView(node.timings));
  footer.append(el("div", { class: "actions" },
    versions(node, siblings, actions),
    iconButton("copy", "Copy this answer", () => actions.copy(node)),
    iconButton("again", "Answer again", () => actions.again(node))));
  return footer;
}

// The text of an answer as elements. An answer in JSON is shown with indentation.
export function answerContent(node) {
  const value = node.json ? parsed(node.text) : undefined;
  const reasoning = node.reasoning ? el("details", { class: "reasoning" },
    el("summary", { class: "small muted", text: "Reasoning" }), markdown(node.reasoning)) : "";
  const body = value !== undefined ? codeBlock(JSON.stringify(value, null, 2))
    : node.json ? codeBlock(node.text) : markdown(node.text);
  const all = document.createDocumentFragment();
  all.append(reasoning, body);
  return all;
}

function answerFacts(node) {
  const facts = [];
  const add = (text, kind = "", title = "") => facts.push(el("span", { class: `chip ${kind}`, text, title }));
  if (node.state === "stopped") add("stopped", "warn");
  if (node.state === "interrupted") add("interrupted", "warn", "The page was closed while the answer arrived.");
  if (node.finish === "length") add("cut at the longest answer", "warn");
  if (node.json && node.state === "done") {
    if (node.finish === "length" || parsed(node.text) === undefined) add("JSON not complete", "warn");
    else add("JSON of the schema", "ok", "The server lets the model write only what the schema allows.");
  }
  const { measured, usage, images } = node;
  if (measured?.ttft != null) add(`first token ${milliseconds(measured.ttft)}`, "", "Measured in this page");
  if (measured?.rate != null) add(`${measured.rate.toFixed(measured.rate < 10 ? 1 : 0)} tokens/s`);
  if (usage) facts.push(...usageFacts(usage, images || [], node.timings));
  return facts;
}

function usageFacts(usage, images, timings) {
  const facts = [];
  const add = (text, kind = "", title = "") => facts.push(el("span", { class: `chip ${kind}`, text, title }));
  const { cached_tokens: cached = 0, image_tokens: visual = 0 } = usage.prompt_tokens_details || {};
  add(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`, "", "Tokens of the prompt and of the answer");
  const saved = images.reduce((sum, image) => sum + ((image.of ?? image.visual_tokens) - image.visual_tokens), 0);
  if (visual) add(saved ? `${visual} of ${visual + saved} visual tokens` : `${visual} visual tokens`);
  if (cached) {
    add(`${cached} prompt tokens cached`, "ok", "The server had computed this part of the prompt before.");
  }
  if (visual && timings && timings.encode === 0) {
    add("image not encoded again", "ok", "The encoder's output was cached.");
  }
  return facts;
}

function versions(node, siblings, actions) {
  if (siblings.length < 2) return null;
  const at = siblings.indexOf(node);
  const back = iconButton("left", "Earlier version", () => actions.beside(node, -1));
  const on = iconButton("right", "Later version", () => actions.beside(node, 1));
  back.disabled = at === 0;
  on.disabled = at === siblings.length - 1;
  return el("span", { class: "versions", role: "group", "aria-label": "Versions" }, back,
    el("span", { class: "small number", text: `${at + 1} of ${siblings.length}` }), on);
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

export function mediaView(viewer, item, url, use) {
  if (!url) return el("span", { class: "chip warn", text: `${item.name} is missing` });
  return item.kind === "video" ? videoView(item, url) : thumbnail(viewer, item, url, use);
}
