// One answer that arrives: from the request to the stored message. It goes on when its conversation is not shown.

import { Measure, imagesOf, requestBody } from "./request.js";
import { StreamText } from "./stream_text.js";

const SAVE_MS = 2000;
const LIVE_MS = 250;

export class Run {
  // parts: {client, history, options, conversation, node, announcer, model, onText, onEnd}.
  constructor(parts) {
    Object.assign(this, parts);
    this.abort = new AbortController();
    this.measure = new Measure();
    this.saved = this.shown = performance.now();
    this.ended = false;
  }

  // Show this answer in a view of message.js from now on.
  attach({ text, live }) {
    this.live = live;
    this.stream = new StreamText(text, () => this.onShow());
    if (this.node.text) this.stream.append(this.node.text);
    this.showLive();
    if (!this.timer) this.timer = setInterval(() => this.showLive(), LIVE_MS);
  }

  stop() {
    this.abort.abort();
  }

  async start() {
    const { node } = this;
    for (const name of ["fovea:first-event", "fovea:first-visible"]) performance.clearMarks(name);
    try {
      const path = this.conversation.pathTo(this.conversation.nodes.get(node.parent));
      const body = await requestBody(path, this.history, this.options, this.model);
      node.json = Boolean(body.response_format);
      node.pictures = imagesOf(path).map(({ id }) => id);
      this.measure = new Measure();
      this.abort.signal.throwIfAborted();
      for await (const chunk of this.client.chat(body, this.abort.signal)) this.take(chunk);
      node.state = "done";
    } catch (error) {
      node.state = error.name === "AbortError" ? "stopped" : "error";
      if (node.state === "error") node.error = error.message;
    } finally {
      await this.end();
    }
  }

  take(chunk) {
    const { node } = this;
    const choice = chunk.choices?.[0];
    const content = choice?.delta?.content || "";
    if (choice?.delta?.reasoning) node.reasoning = (node.reasoning || "") + choice.delta.reasoning;
    if (choice?.finish_reason) node.finish = choice.finish_reason;
    if (chunk.usage) node.usage = chunk.usage;
    if (chunk.fovea) Object.assign(node, { timings: chunk.fovea.timings_ms, images: chunk.fovea.images });
    this.measure.note(chunk, Boolean(content || choice?.delta?.reasoning));
    if (!content) return;
    if (!node.text) performance.mark("fovea:first-event");
    node.text += content;
    this.stream?.append(content);
    this.announcer.add(content);
    this.saveSometimes();
  }

  onShow() {
    if (!this.visible && this.node.text) {
      this.visible = true;
      // The next frame begins once this one, with the first text, is on the screen.
      requestAnimationFrame(() => performance.mark("fovea:first-visible"));
    }
    const now = performance.now();
    if (now - this.shown > LIVE_MS) {
      this.shown = now;
      this.showLive();
    }
    this.onText();
  }

  showLive() {
    if (this.ended) return;
    const { ttft, rate, tokens, total } = this.measure;
    const seconds = `${(total / 1000).toFixed(1)} s`;
    if (ttft !== null) this.live.textContent = `${tokens} tokens${rate ? `, ${rate.toFixed(0)} per second` : ""}`;
    else if (this.node.reasoning) this.live.textContent = `The model reasons: ${seconds}`;
    else this.live.textContent = `Waiting for the first token: ${seconds}`;
  }

  async saveSometimes() {
    if (performance.now() - this.saved < SAVE_MS) return;
    this.saved = performance.now();
    await this.history.save(this.conversation).catch(() => {});
  }

  async end() {
    const { node, measure } = this;
    this.ended = true;
    clearInterval(this.timer);
    node.measured = { ttft: measure.ttft, rate: rateOf(node) ?? measure.rate, total: measure.total };
    this.stream?.end();
    this.announcer.end({ done: "Answer complete.", stopped: "Answer stopped." }[node.state] || "");
    this.conversation.updated = Date.now();
    await this.onEnd(this);
  }
}

// Tokens per second by the server's clock, which bursts on the way here do not distort; null: it is not known.
function rateOf({ timings, usage }) {
  return timings?.decode > 0 && usage?.completion_tokens > 1
    ? (1000 * (usage.completion_tokens - 1)) / timings.decode : null;
}
