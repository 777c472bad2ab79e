// The text of an answer while it arrives. Chunks are collected and shown at most once per frame: finished blocks
// become elements, and the rest is one text node to which text is only appended.

import { finishedLength, markdown } from "./markdown.js";

const HIDDEN_MS = 250; // a hidden page has no frames, but its text should be there when it is shown again

export class StreamText {
  // onShow: called after each time that text was shown.
  constructor(container, onShow = () => {}) {
    this.container = container;
    this.onShow = onShow;
    this.text = "";
    this.waiting = "";
    this.blocks = 0; // characters of `text` that are elements already
    this.planned = null;
    this.tail = document.createElement("p");
    this.tail.className = "tail";
    this.tail.append(document.createTextNode(""));
    container.replaceChildren(this.tail);
  }

  append(chunk) {
    this.text += chunk;
    this.waiting += chunk;
    if (this.planned) return;
    const show = () => { this.planned = null; this.show(); };
    if (document.hidden) {
      const timer = setTimeout(show, HIDDEN_MS);
      this.planned = () => clearTimeout(timer);
    } else {
      const frame = requestAnimationFrame(show);
      this.planned = () => cancelAnimationFrame(frame);
    }
  }

  show() {
    const ended = this.waiting.includes("\n");
    this.tail.firstChild.appendData(this.waiting);
    this.waiting = "";
    if (ended) this.finishBlocks();
    this.onShow();
  }

  finishBlocks() {
    const rest = this.text.slice(this.blocks);
    const length = finishedLength(rest);
    if (!length) return;
    this.tail.before(markdown(rest.slice(0, length)));
    this.tail.firstChild.data = rest.slice(length);
    this.blocks += length;
  }

  // Show all of the text now. The thread then replaces it by the finished answer.
  end() {
    if (!this.planned) return;
    this.planned();
    this.planned = null;
    this.show();
  }
}
