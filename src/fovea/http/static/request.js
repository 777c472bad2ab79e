// One question to the server: its body, and what is measured while the answer arrives.

import { dataUrlOf } from "./media.js";

// Build the body of a request. path: the messages up to the question. history: has the bytes of their media.
export async function requestBody(path, history, options, model) {
  const messages = options.values.system.trim() ? [{ role: "system", content: options.values.system.trim() }] : [];
  for (const node of path) {
    if (node.role === "user") messages.push({ role: "user", content: await parts(node, history) });
    else if (node.text) messages.push({ role: "assistant", content: node.text });
  }
  const hasImages = imagesOf(path).length > 0;
  return {
    model: model || undefined, messages, stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true }, ...options.fields(hasImages),
  };
}

// The images of messages, in the order in which an answer reports about them.
export function imagesOf(path) {
  return path.flatMap((node) => (node.media || []).filter((item) => item.kind === "image"));
}

async function parts(node, history) {
  const media = await Promise.all(node.media.map(async ({ id, kind, name }) => {
    const item = await history.media(id);
    if (!item) throw new Error(`${name} is no longer in this browser's history.`);
    const url = await dataUrlOf(item.blob);
    return kind === "video" ? { type: "video_url", video_url: { url } } : { type: "image_url", image_url: { url } };
  }));
  return [...media, ...(node.text ? [{ type: "text", text: node.text }] : [])];
}

// What the page measures of an answer. clock: milliseconds.
export class Measure {
  constructor(clock = () => performance.now()) {
    this.clock = clock;
    this.started = clock();
    this.first = null;
    this.last = null;
    this.tokens = 0;
  }

  // Note a chunk of the answer. hasText: whether it has text.
  note(chunk, hasText) {
    this.tokens = chunk.usage?.completion_tokens ?? this.tokens;
    if (!hasText) return;
    this.last = this.clock();
    this.first ??= this.last;
  }

  // Milliseconds from the request to the first text; null: there is none yet.
  get ttft() {
    return this.first === null ? null : this.first - this.started;
  }

  // Tokens per second after the first one; null: too few.
  get rate() {
    const ms = this.last - this.first;
    return this.tokens > 1 && ms > 0 ? (1000 * (this.tokens - 1)) / ms : null;
  }

  get total() {
    return this.clock() - this.started;
  }
}
