// A small part of Markdown as elements: headings, lists, tables, quotes, code, bold, italic and links.
// Everything is built from text nodes, so markup within an answer stays text. Images are not loaded.

import { el } from "./dom.js";

const FENCE = /^\s{0,3}(```|~~~)[^`]*$/;
const ITEM = /^(\s*)([-*+]|\d{1,3}[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const ROW = /^\s*\|.*\|\s*$/;
const ALIGNMENT = /^\s*\|(\s*:?-+:?\s*\|)+\s*$/;
const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|__(.+?)__|\*([^*\s](?:[^*]*[^*\s])?)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;

const DEEPEST = 8; // quotes within quotes; deeper ones stay text
const LONGEST = 5000; // characters of a line within which marks are looked for

// Render a text as a fragment. depth: of the quote around it.
export function markdown(text, depth = 0) {
  const lines = text.split("\n");
  const out = document.createDocumentFragment();
  for (let at = 0; at < lines.length;) {
    for (const read of [fence, heading, rule, table, quote, list, paragraph]) {
      const found = read(lines, at, depth);
      if (!found) continue;
      if (found.node) out.append(found.node);
      at = found.next;
      break;
    }
  }
  return out;
}

// The number of characters of a text that form finished blocks: up to its last blank line outside of code.
export function finishedLength(text) {
  let finished = 0;
  let at = 0;
  let code = false;
  for (const line of text.split("\n").slice(0, -1)) {
    at += line.length + 1;
    if (FENCE.test(line)) code = !code;
    if (!code && line.trim() === "") finished = at;
  }
  return finished;
}

function fence(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open) return null;
  let end = at + 1;
  while (end < lines.length && !lines[end].trim().startsWith(open[1])) end += 1;
  return { node: codeBlock(lines.slice(at + 1, end).join("\n")), next: end + 1 };
}

export function codeBlock(text) {
  return el("pre", { tabindex: "0" }, el("code", { text }));
}

function headingOf(line) {
  return line.length > LONGEST ? null : HEADING.exec(line);
}

function heading(lines, at) {
  const match = headingOf(lines[at]);
  if (!match) return null;
  // Headings of an answer lie below the page's own ones.
  return { node: el(`h${Math.min(6, match[1].length + 3)}`, {}, inline(match[2])), next: at + 1 };
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? { node: el("hr"), next: at + 1 } : null;
}

function table(lines, at) {
  if (!ROW.test(lines[at]) || !ALIGNMENT.test(lines[at + 1] || "")) return null;
  let end = at + 2;
  while (end < lines.length && ROW.test(lines[end])) end += 1;
  const cells = (line, tag) => line.trim().slice(1, -1).split("|").map((cell) => el(tag, {}, inline(cell.trim())));
  return {
    node: el("div", { class: "scroll-x" }, el("table", {},
      el("thead", {}, el("tr", {}, cells(lines[at], "th"))),
      el("tbody", {}, lines.slice(at + 2, end).map((line) => el("tr", {}, cells(line, "td")))))),
    next: end,
  };
}

function quote(lines, at, depth) {
  if (depth >= DEEPEST) return null;
  let end = at;
  while (end < lines.length && /^\s{0,3}>/.test(lines[end])) end += 1;
  if (end === at) return null;
  const inner = lines.slice(at, end).map((line) => line.replace(/^\s{0,3}> ?/, ""));
  return { node: el("blockquote", {}, markdown(inner.join("\n"), depth + 1)), next: end };
}

function list(lines, at) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const depth = first[1].length;
  const ordered = /\d/.test(first[2]);
  const node = el(ordered ? "ol" : "ul", ordered ? { start: parseInt(first[2], 10) } : {});
  let next = at;
  while (next < lines.length) {
    const item = ITEM.exec(lines[next]);
    if (!item || item[1].length < depth) break;
    if (item[1].length > depth + 1 && node.lastChild) {
      const inner = list(lines, next);
      node.lastChild.append(inner.node);
      next = inner.next;
      continue;
    }
    node.append(el("li", {}, inline(item[3])));
    next += 1;
  }
  return { node, next };
}

function paragraph(lines, at) {
  if (lines[at].trim() === "") return { node: null, next: at + 1 };
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && !startsBlock(lines, end)) end += 1;
  const node = el("p");
  lines.slice(at, end).forEach((line, number) => {
    if (number) node.append(el("br"));
    node.append(...inline(line));
  });
  return { node, next: end };
}

function startsBlock(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || headingOf(line) || ITEM.test(line) || /^\s{0,3}>/.test(line) || RULE.test(line);
}

function inline(text) {
  if (text.length > LONGEST) return [document.createTextNode(text)];
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > at) nodes.push(document.createTextNode(text.slice(at, match.index)));
    nodes.push(span(match));
    at = match.index + match[0].length;
  }
  if (at < text.length) nodes.push(document.createTextNode(text.slice(at)));
  return nodes;
}

function span([, , code, bold, strong, italic, label, address]) {
  if (code !== undefined) return el("code", { text: code });
  if (bold !== undefined || strong !== undefined) return el("strong", {}, inline(bold ?? strong));
  if (italic !== undefined) return el("em", {}, inline(italic));
  return el("a", { href: address, target: "_blank", rel: "noopener noreferrer", text: label });
}
