// The page: wires the history, the form, the list of conversations and the running answers together.

import { exportHistory, importHistory } from "./archive.js";
import { Announcer } from "./announcer.js";
import { Attachments } from "./attachments.js";
import { Client } from "./client.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { confirmed, download, el } from "./dom.js";
import { History } from "./history.js";
import { Keys, askForKey } from "./key.js";
import { MediaUrls } from "./media.js";
import { Models } from "./models.js";
import { Options } from "./options.js";
import { panels } from "./panels.js";
import { choosePages } from "./pdf.js";
import { Run } from "./run.js";
import { showConversations } from "./sidebar.js";
import { Thread } from "./thread.js";
import { themeButton } from "./theme.js";
import { Viewer } from "./viewer.js";

const find = (selector) => document.querySelector(selector);

class App {
  constructor(history, figures) {
    this.history = history;
    this.keys = new Keys("fovea-key");
    this.client = new Client(this.keys, (reason) => askForKey(find("#key-dialog"), this.keys, reason));
    this.announcer = new Announcer(find("#announcer"));
    this.options = new Options(find("#options"), figures);
    this.options.onChange = () => this.showOptions();
    this.urls = new MediaUrls(history);
    this.viewer = new Viewer(find("#viewer"));
    this.runs = new Map();
    this.models = new Models(this.client, find("#model"), find("#status"), (text) => this.tell(text));
    const actions = {
      edit: (node) => this.edit(node),
      again: (node) => this.answer(this.conversation.nodes.get(node.parent)),
      copy: (node) => this.copy(node),
      beside: (node, step) => this.beside(node, step),
    };
    this.thread = new Thread(find("#scroll"), find("#thread"), this.viewer, this.urls, actions);
    this.attachments = new Attachments(find("#attachments"), this.client,
      (name, pages) => choosePages(find("#pdf-dialog"), name, pages), (text) => this.tell(text));
    this.models.onChange = () => this.showModel();
    this.composer = new Composer(find("#composer"), this.attachments, {
      send: (text, items, editing) => this.send(text, items, editing),
      stop: () => this.stop(), tell: (text) => this.tell(text),
    });
  }

  async start() {
    themeButton(find("#theme"));
    panels();
    this.showOptions();
    addEventListener("hashchange", () => this.open(location.hash.slice(1)));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.defaultPrevented && !find("dialog[open]")) this.stop();
    });
    find("#new").addEventListener("click", () => this.openNew());
    find("#export").addEventListener("click", () => this.export());
    find("#import").addEventListener("click", () => find("#import-file").click());
    find("#import-file").addEventListener("change", (event) => this.import(event.target));
    find("#delete-all").addEventListener("click", () => this.removeAll());
    find("#reset-options").addEventListener("click", () => this.options.reset());
    find("#forget-key").addEventListener("click", () => { this.keys.value = ""; this.models.load(); });
    await this.open(location.hash.slice(1));
    await this.models.load();
  }

  // Open a stored conversation; an unknown id opens a new one.
  async open(id) {
    if (this.conversation?.id === id) return;
    this.composer.endEdit();
    const record = id ? this.runs.get(id)?.conversation.record ?? await this.history.load(id) : null;
    this.conversation = this.runs.get(id)?.conversation ?? new Conversation(record ?? {});
    for (const node of this.conversation.nodes.values()) {
      if (node.state === "streaming" && !this.runs.has(id)) node.state = "interrupted";
    }
    const release = this.urls.forget();
    await this.show();
    release();
    find("#question").focus();
  }

  openNew() {
    if (location.hash) history.pushState(null, "", location.pathname + location.search);
    this.conversation = null;
    if (this.composer.editing) this.composer.cancelEdit();
    return this.open("");
  }

  async show(keepPlace = false) {
    const run = this.runs.get(this.conversation.id);
    this.composer.setBusy(Boolean(run));
    await this.thread.show(this.conversation, run, this.models.name, keepPlace);
    await this.showList();
  }

  async showList() {
    const records = await this.history.list();
    showConversations(find("#conversations"), records, this.conversation.id,
      { remove: (id, title) => this.remove(id, title) });
    find("#no-history").hidden = records.length > 0;
  }

  // A model for text alone has no buttons for images, and the page does not ask for any. Behind a gateway no PDF
  // files are offered.
  showModel() {
    const { name, takesImages, readsPdf } = this.models;
    const media = readsPdf ? "images, PDF files or a video" : "images or a video";
    for (const attribute of ["aria-label", "title"]) find("#attach").setAttribute(attribute, `Attach ${media}`);
    find("#drop-cover p").textContent = `Drop ${media}`;
    find("#files").accept = `image/*,video/mp4,video/webm${readsPdf ? ",application/pdf,.pdf" : ""}`;
    document.body.classList.toggle("no-pdf", !readsPdf);
    this.attachments.readsPdf = readsPdf;
    document.body.classList.toggle("text-only", !takesImages);
    this.attachments.refusal = takesImages ? "" : `The model ${name} takes text alone.`;
  }

  showOptions() {
    find("#option-summary").replaceChildren(
      ...this.options.summary.map((text) => el("span", { class: "chip", text })));
  }

  async send(text, items, editing) {
    const { conversation } = this;
    const parent = editing ? editing.parent : conversation.path().at(-1)?.id ?? null;
    try {
      for (const item of items) await this.history.addMedia(item);
    } catch {
      this.tell("The browser has no room to store the images. Delete conversations, and try again.");
      this.composer.edit({ ...(editing ?? { id: "", parent }), text }, items);
      return;
    }
    const media = items.map(({ id, kind, name, width, height }) => ({ id, kind, name, width, height }));
    await this.answer(conversation.add(parent, { role: "user", text, media }));
  }

  // Ask for a new answer to a question.
  async answer(question) {
    const { conversation } = this;
    if (this.runs.has(conversation.id)) return;
    const node = conversation.add(question.id, {
      role: "assistant", text: "", state: "streaming", model: this.models.name,
    });
    const run = new Run({
      client: this.client, history: this.history, options: this.options, announcer: this.announcer,
      conversation, node, model: this.models.name, onText: () => this.thread.follow(),
      onEnd: () => this.onEnd(conversation, node),
    });
    this.runs.set(conversation.id, run);
    const shown = this.show();
    if (location.hash.slice(1) !== conversation.id) history.pushState(null, "", `#${conversation.id}`);
    await this.save(conversation);
    await shown;
    await run.start();
  }

  async onEnd(conversation, node) {
    this.runs.delete(conversation.id);
    await this.save(conversation);
    if (this.conversation !== conversation) return;
    this.composer.setBusy(false);
    await this.thread.finish(conversation, node, this.models.name);
    await this.showList();
  }

  async save(conversation) {
    try {
      await this.history.save(conversation);
    } catch {
      this.tell("The browser has no room to store this conversation. Export and delete older ones.");
    }
  }

  stop() {
    this.runs.get(this.conversation.id)?.stop();
  }

  async edit(node) {
    const items = (await Promise.all(node.media.map(({ id }) => this.history.media(id)))).filter(Boolean);
    this.composer.edit(node, items);
  }

  async beside(node, step) {
    if (!this.conversation.chooseBeside(node, step)) return;
    await this.save(this.conversation);
    await this.show(true);
  }

  async copy(node) {
    try {
      await navigator.clipboard.writeText(node.text);
      this.tell("Copied.");
    } catch {
      this.tell("The browser does not let this page copy. Select the text, and copy it.");
    }
  }

  async remove(id, title) {
    if (!(await confirmed(`Delete “${title || "Untitled"}” and its images from this browser?`, "Delete"))) return;
    this.runs.get(id)?.stop();
    await this.history.remove(id);
    if (this.conversation.id === id) {
      await this.openNew();
    } else {
      await this.showList();
      find("#new").focus();
    }
  }

  async removeAll() {
    if (!(await confirmed("Delete all conversations and images from this browser?", "Delete all"))) return;
    for (const run of this.runs.values()) run.stop();
    await this.history.clear();
    await this.openNew();
  }

  async export() {
    const day = new Date().toISOString().slice(0, 10);
    download(await exportHistory(this.history), `fovea-history-${day}.json`);
  }

  async import(input) {
    const [file] = input.files;
    input.value = "";
    if (!file) return;
    try {
      const count = await importHistory(this.history, file);
      this.tell(count === 1 ? "1 conversation was added." : `${count} conversations were added.`);
      await this.showList();
    } catch (error) {
      this.tell(`Nothing was imported. ${error.message}`);
    }
  }

  // Show a message for a few seconds, and announce it.
  tell(text) {
    const notice = el("div", { class: "toast", text });
    find("#toasts").append(notice);
    setTimeout(() => notice.remove(), 8000);
  }
}

async function start() {
  const [stored, figures] = await Promise.all([
    History.open(), fetch(new URL("ui/budget.json", document.baseURI)).then((response) => response.json()),
  ]);
  const app = new App(stored, figures);
  await app.start();
}

start().catch((error) => {
  find("#thread").replaceChildren(el("p", { class: "notice danger", role: "alert",
    text: `The page could not start: ${error.message}` }));
});
