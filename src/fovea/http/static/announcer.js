// Tells screen readers about an answer: whole sentences as they are finished, never single tokens.

import { el } from "./dom.js";

const SENTENCE = /[.!?…。！？](?=["')\]]?\s)|\n/g;
const KEPT = 20;

export class Announcer {
  // region: an element with aria-live="polite".
  constructor(region) {
    this.region = region;
    this.rest = "";
  }

  // Add a part of an answer. Its finished sentences are announced.
  add(text) {
    this.rest += text;
    let end = 0;
    for (const match of this.rest.matchAll(SENTENCE)) end = match.index + match[0].length;
    if (!end) return;
    this.say(this.rest.slice(0, end));
    this.rest = this.rest.slice(end);
  }

  // Announce the rest of the answer, and how it ended.
  end(status) {
    this.say(this.rest);
    this.rest = "";
    this.say(status);
  }

  say(text) {
    if (!text.trim()) return;
    this.region.append(el("p", { text: text.trim() }));
    while (this.region.childElementCount > KEPT) this.region.firstChild.remove();
  }
}
