// The history as one JSON file, to keep it or to carry it to another browser.

import { bytesOfDataUrl, dataUrlOf } from "./media.js";

const FORMAT = "fovea-history";
const VERSION = 1;
const FIELDS = ["created", "state", "error", "model", "finish", "json", "reasoning", "usage", "timings", "images",
  "pictures", "measured"];
const MEDIA_TYPES = /^(image\/(png|jpeg|webp|gif|bmp)|video\/(mp4|webm))$/;

// Write the whole history as a blob. Its media are written one at a time, so that no text holds all of them.
export async function exportHistory(history) {
  const records = await history.all("conversations");
  const parts = [`{"format":"${FORMAT}","version":${VERSION},"conversations":${JSON.stringify(records)},"media":[`];
  let first = true;
  for (const { blob, ...item } of await history.all("media")) {
    parts.push(`${first ? "" : ","}${JSON.stringify({ ...item, data: await dataUrlOf(blob) })}`);
    first = false;
  }
  return new Blob([...parts, "]}"], { type: "application/json" });
}

// Add the conversations of a file to the history. One that is here already stays unless the file's is newer.
// Returns how many were added. Raises Error, with nothing changed, for a file that is not such a history.
export async function importHistory(history, file) {
  let content;
  try {
    content = JSON.parse(await file.text());
  } catch {
    throw new Error(`${file.name} is not JSON.`);
  }
  if (content?.format !== FORMAT || content.version !== VERSION) {
    throw new Error(`${file.name} is not an exported history of this page.`);
  }
  const media = list(content.media).map(mediaItem);
  const known = new Map((await history.list()).map((record) => [record.id, record.updated]));
  const records = list(content.conversations).map(conversation)
    .filter((record) => !(known.get(record.id) >= record.updated));
  await history.putAll(records, media);
  return records.length;
}

function mediaItem(item) {
  const { type, bytes } = bytesOfDataUrl(text(item.data));
  if (!MEDIA_TYPES.test(type)) throw new Error(`The file holds media of type ${type}.`);
  return {
    id: text(item.id), kind: type.startsWith("video/") ? "video" : "image", name: text(item.name),
    width: number(item.width), height: number(item.height), blob: new Blob([bytes], { type }),
  };
}

function conversation(record) {
  return {
    id: text(record.id), title: text(record.title), created: number(record.created),
    updated: number(record.updated), chosen: Object.fromEntries(Object.entries(record.chosen ?? {}).map(
      ([parent, child]) => [parent, text(child)])), nodes: list(record.nodes).map(message),
  };
}

function message(node) {
  if (node.role !== "user" && node.role !== "assistant") throw new Error("A message has an unknown role.");
  const known = Object.fromEntries(FIELDS.filter((name) => name in node).map((name) => [name, node[name]]));
  const media = (node.media || []).map(({ id, kind, name, width, height }) => {
    return { id: text(id), kind: text(kind), name: text(name), width: number(width), height: number(height) };
  });
  return { ...known, role: node.role, id: text(node.id), parent: node.parent === null ? null : text(node.parent),
    text: text(node.text), ...(node.role === "user" ? { media } : {}) };
}

function list(value) {
  if (!Array.isArray(value)) throw new Error("The file is damaged: a list is missing.");
  return value;
}

function text(value) {
  if (typeof value !== "string") throw new Error("The file is damaged: a text is missing.");
  return value;
}

function number(value) {
  if (!Number.isFinite(value)) throw new Error("The file is damaged: a number is missing.");
  return value;
}
