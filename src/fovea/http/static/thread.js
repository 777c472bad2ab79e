// The messages of the branch that is shown, as elements.

import { el } from "./dom.js";
import { answerFooter, answerView, mediaView, questionView } from "./message.js";

const NEAR_END = 80; // pixels within which the page follows an answer

export class Thread {
  // root: the scrolling element. list: the element of the messages. actions: see message.js.
  constructor(root, list, viewer, urls, actions) {
    Object.assign(this, { root, list, viewer, urls, actions });
    this.turn = 0;
  }

  // Show a conversation. run: the answer that arrives for it, if there is one. name: of the model. keepPlace: whether
  // the page stays where it is scrolled to.
  async show(conversation, run, name, keepPlace = false) {
    const turn = ++this.turn;
    const path = conversation.path();
    const views = await Promise.all(path.map((node) => this.view(conversation, node, run, name)));
    if (turn !== this.turn) return;
    const focus = this.focused();
    const place = this.root.scrollTop;
    this.list.replaceChildren(...(views.length ? views.map(({ view }) => view) : [welcome()]));
    for (const { node, parts } of views) if (run?.node === node) run.attach(parts);
    this.root.scrollTop = keepPlace ? place : this.root.scrollHeight;
    if (focus) this.focus(focus);
  }

  // Where the focus is within the messages: {index, label}; null: elsewhere.
  focused() {
    const at = document.activeElement;
    const message = at.closest?.(".message");
    return message ? { index: [...this.list.children].indexOf(message), label: at.getAttribute("aria-label") } : null;
  }

  // Set the focus to the same button of the message in the same place, or to one that is near.
  focus({ index, label }) {
    const buttons = [...this.list.children[index]?.querySelectorAll("button:enabled") ?? []];
    const same = buttons.find((button) => button.getAttribute("aria-label") === label);
    (same ?? buttons.find((button) => button.closest(".versions")) ?? document.querySelector("#question")).focus();
  }

  async view(conversation, node, run, name) {
    const siblings = conversation.siblings(node);
    if (node.role === "user") {
      const media = await Promise.all(node.media.map(async (item) => {
        return mediaView(this.viewer, item, await this.urls.url(item.id), null);
      }));
      return { node, view: questionView(node, siblings, this.actions, media) };
    }
    const parts = answerView(node, siblings, this.actions, node.model || name);
    if (node.state !== "streaming") {
      const pictures = await this.pictures(conversation, node);
      parts.view.append(answerFooter(node, siblings, this.actions, pictures));
    }
    return { node, view: parts.view, parts };
  }

  // Thumbnails of the images for which an answer reports relevance.
  async pictures(conversation, node) {
    const items = new Map([...conversation.nodes.values()].flatMap((other) => other.media || [])
      .map((item) => [item.id, item]));
    const uses = (node.images || []).map((use, index) => ({ use, item: items.get(node.pictures?.[index]) }));
    return Promise.all(uses.filter(({ use, item }) => use.relevance && item)
      .map(async ({ use, item }) => mediaView(this.viewer, item, await this.urls.url(item.id), use)));
  }

  // Replace an answer that has ended, without touching the other messages.
  async finish(conversation, node, name) {
    const shown = this.list.querySelector(`[data-id="${node.id}"]`);
    const following = this.following;
    const { view } = await this.view(conversation, node, null, name);
    if (shown?.isConnected) shown.replaceWith(view);
    if (following) this.root.scrollTop = this.root.scrollHeight;
  }

  get following() {
    return this.root.scrollHeight - this.root.scrollTop - this.root.clientHeight < NEAR_END;
  }

  // Keep the newest text in view, unless the user has scrolled up.
  follow() {
    if (this.following) this.root.scrollTop = this.root.scrollHeight;
  }
}

function welcome() {
  return el("div", { class: "welcome" },
    el("h2", { class: "with-images", text: "Ask about an image" }),
    el("h2", { class: "without-images", text: "Ask a question" }),
    el("p", { class: "muted with-images" }, "Paste, drop or choose images", el("span", { class: "with-pdf", text: ", PDF files" }),
      " or a video, and ask a question. " +
      "Answers show how long each stage took, what was cached, and where the model looked."),
    el("p", { class: "small muted" },
      el("kbd", { text: "Enter" }), " sends, ", el("kbd", { text: "Shift+Enter" }), " starts a new line, ",
      el("kbd", { text: "Esc" }), " stops an answer"));
}
