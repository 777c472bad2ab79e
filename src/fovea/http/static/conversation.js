// A conversation is a tree: an edited question or another answer is a sibling of the earlier one.
// The branch that is shown follows, from the root, the chosen child of every message.

import { newId } from "./dom.js";

const ROOT = "root";

export class Conversation {
  // record: what the history stores: {id, title, created, updated, nodes, chosen}.
  constructor(record = {}) {
    this.id = record.id || newId();
    this.title = record.title || "";
    this.created = record.created || Date.now();
    this.updated = record.updated || this.created;
    this.nodes = new Map((record.nodes || []).map((node) => [node.id, node]));
    this.chosen = new Map(Object.entries(record.chosen || {}));
  }

  get record() {
    const { id, title, created, updated } = this;
    return { id, title, created, updated, nodes: [...this.nodes.values()], chosen: Object.fromEntries(this.chosen) };
  }

  children(parent) {
    return [...this.nodes.values()].filter((node) => node.parent === parent);
  }

  siblings(node) {
    return this.children(node.parent).filter((other) => other.role === node.role);
  }

  // The messages of the branch that is shown, in order.
  path() {
    const shown = [];
    for (let parent = null; ;) {
      const children = this.children(parent);
      if (!children.length) return shown;
      const chosen = this.nodes.get(this.chosen.get(parent ?? ROOT));
      const next = chosen && chosen.parent === parent ? chosen : children.at(-1);
      shown.push(next);
      parent = next.id;
    }
  }

  // The messages from the root to a node, the node included.
  pathTo(node) {
    const path = [];
    for (let at = node; at; at = this.nodes.get(at.parent)) path.unshift(at);
    return path;
  }

  // Add a message below a parent (null: the first one) and show it.
  add(parent, fields) {
    const node = { id: newId(), parent, created: Date.now(), ...fields };
    this.nodes.set(node.id, node);
    this.choose(node);
    if (!this.title && node.role === "user") this.title = titleOf(node);
    this.updated = Date.now();
    return node;
  }

  choose(node) {
    this.chosen.set(node.parent ?? ROOT, node.id);
  }

  // Show the sibling that lies `step` places after a node.
  chooseBeside(node, step) {
    const siblings = this.siblings(node);
    const next = siblings[siblings.indexOf(node) + step];
    if (next) this.choose(next);
    return next;
  }

  get mediaIds() {
    return new Set([...this.nodes.values()].flatMap((node) => (node.media || []).map((item) => item.id)));
  }
}

function titleOf(node) {
  const words = node.text.trim().replace(/\s+/g, " ");
  if (words) return words.length > 60 ? `${words.slice(0, 59)}…` : words;
  return node.media.length ? node.media[0].name : "Untitled";
}
