// The served models, and whether the server is ready.

import { el } from "./dom.js";

const POLL_MS = 2000;

export class Models {
  // select: shows the names. status: shows whether the server is ready. tell(text): shows a message.
  constructor(client, select, status, tell) {
    Object.assign(this, { client, select, status, tell });
    this.cards = new Map();
    this.onChange = () => {};
    select.addEventListener("change", () => this.onChange());
  }

  // Whether the chosen model takes images. One that does not tell is asked all the same.
  get takesImages() {
    return this.cards.get(this.name)?.input_modalities?.includes("image") ?? true;
  }

  // Whether pages of PDF files can be rendered. A gateway has no route for that.
  get readsPdf() {
    return this.cards.get(this.name)?.owned_by !== "fovea-gateway";
  }

  get name() {
    return this.select.value;
  }

  // Ask the server for its models, and wait until it is ready.
  async load() {
    try {
      const models = await this.client.models();
      this.cards = new Map(models.map((card) => [card.id, card]));
      this.select.replaceChildren(...models.map(({ id }) => el("option", { value: id, text: id })));
      this.onChange();
      await this.watch();
    } catch (error) {
      this.showStatus("danger", error.status === 401 ? "Key needed" : "Not reachable");
      this.tell(error.message);
    }
  }

  async watch() {
    for (;;) {
      const { ready, reason } = await this.client.ready();
      if (ready) break;
      this.showStatus("warn", reason);
      await new Promise((resolve) => { setTimeout(resolve, POLL_MS); });
    }
    this.showStatus("ok", "Ready");
  }

  showStatus(kind, text) {
    this.status.replaceChildren(el("span", { class: `dot ${kind}`, "aria-hidden": "true" }),
      el("span", { class: "status-text", text }));
  }
}
