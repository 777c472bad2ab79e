// The images and videos of the question that is being written.

import { ApiError } from "./client.js";
import { el, iconButton, newId } from "./dom.js";
import { bytesOfDataUrl, kindOf, readImage, readVideo } from "./media.js";

const LOADED_MS = 5000; // a picture has certainly been loaded from its object URL by then
const PDF_SIDE = 1600; // pixels of the longer side of a page

export class Attachments {
  // strip: the element that shows them. choosePages(name, pages): asks which of so many pages of a PDF; resolves with
  // [first, last] or null. tell(text): shows a message.
  constructor(strip, client, choosePages, tell) {
    Object.assign(this, { strip, client, choosePages, tell });
    this.items = [];
    this.views = new Map(); // by item: its element, which stays while others come and go
    this.onChange = () => {};
    this.refusal = ""; // why no file can be attached now
    this.readsPdf = true; // whether the server renders pages of PDF files
  }

  // Add files one after the other, in their order. A file that cannot be used is reported and left out.
  async addFiles(files) {
    if (this.refusal) {
      this.tell(this.refusal);
      return;
    }
    for (const file of files) {
      try {
        await this.addFile(file);
      } catch (error) {
        this.tell(error.message);
      }
    }
  }

  async addFile(file) {
    const kind = kindOf(file);
    const name = file.name || (kind === "video" ? "video" : "image");
    if (kind === "pdf") return this.addPdf(file, name);
    if (kind === "image") return this.add({ kind, name, ...(await readImage(file)) });
    if (kind === "video") return this.add({ kind, name, ...(await readVideo(file)) });
    throw new Error(`${name} is neither an image, nor an MP4 or WebM video, nor a PDF file.`);
  }

  async addPdf(file, name) {
    if (!this.readsPdf) throw new Error(`${name}: PDF files are not read behind a gateway. Attach images of its pages.`);
    const waiting = el("span", { class: "chip", role: "status", text: `${name}: reading pages…` });
    this.strip.append(waiting);
    this.strip.hidden = false;
    try {
      let { pages, data } = await this.client.pdfPages(file, 1, 1, PDF_SIDE);
      if (pages > 1) {
        const range = await this.choosePages(name, pages);
        data = range ? (await this.client.pdfPages(file, ...range, PDF_SIDE)).data : [];
      }
      for (const page of data) {
        const { type, bytes } = bytesOfDataUrl(page.image_url);
        this.add({ kind: "image", name: pages > 1 ? `${name}, page ${page.page} of ${pages}` : name, width: page.width,
          height: page.height, blob: new Blob([bytes], { type }) });
      }
    } catch (error) {
      throw new ApiError(`${name}: ${error.message}`);
    } finally {
      waiting.remove();
      this.show();
    }
  }

  add(item) {
    this.items.push({ id: newId(), ...item });
    this.show();
  }

  // Show these items in place of the present ones.
  replace(items) {
    this.items = items;
    this.show();
  }

  // Return all items, and show none any more.
  take() {
    const { items } = this;
    this.replace([]);
    return items;
  }

  show() {
    for (const [item, { view, url }] of this.views) {
      if (this.items.includes(item)) continue;
      view.remove();
      this.views.delete(item);
      setTimeout(() => URL.revokeObjectURL(url), LOADED_MS);
    }
    for (const item of this.items) if (!this.views.has(item)) this.views.set(item, this.view(item));
    this.strip.append(...this.items.map((item) => this.views.get(item).view));
    this.strip.hidden = !this.items.length;
    this.onChange();
  }

  view(item) {
    const url = URL.createObjectURL(item.blob);
    const picture = item.kind === "video" ? el("video", { src: url, muted: true }) : el("img", { src: url, alt: "" });
    const view = el("div", { class: "attachment", role: "listitem" }, picture,
      el("span", { class: "caption small", text: item.name, title: item.name }),
      iconButton("close", `Remove ${item.name}`, () => {
        this.replace(this.items.filter((other) => other !== item));
      }, "remove"));
    return { view, url };
  }
}
