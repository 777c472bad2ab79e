// The form in which a question is written: text, attachments, sending and stopping.

import { icon } from "./dom.js";
import { hasCamera, takePicture } from "./camera.js";

export class Composer {
  // form: the element of index.html. attachments: Attachments. actions: {send(text, items), stop(), tell(text)}.
  constructor(form, attachments, actions) {
    Object.assign(this, { form, attachments, actions });
    this.text = form.querySelector("textarea");
    this.button = form.querySelector("#send");
    this.editing = null;
    this.busy = false;
    form.addEventListener("submit", (event) => { event.preventDefault(); this.submit(); });
    this.text.addEventListener("keydown", (event) => this.onKey(event));
    this.text.addEventListener("input", () => this.show());
    this.files = form.querySelector("#files");
    form.querySelector("#attach").addEventListener("click", () => this.files.click());
    this.files.addEventListener("change", () => { attachments.addFiles([...this.files.files]); this.files.value = ""; });
    this.camera(form.querySelector("#camera"));
    form.querySelector("#cancel-edit").addEventListener("click", () => this.cancelEdit());
    document.addEventListener("paste", (event) => this.onPaste(event));
    this.acceptDrops();
    attachments.onChange = () => this.show();
    this.show();
  }

  camera(button) {
    button.hidden = !hasCamera();
    button.addEventListener("click", async () => {
      try {
        const file = await takePicture(document.querySelector("#camera-dialog"));
        if (file) await this.attachments.addFiles([file]);
      } catch (error) {
        this.actions.tell(error.message);
      }
      this.text.focus();
    });
  }

  onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.submit();
  }

  // Files of the clipboard are attached. If it also holds text, as from a spreadsheet, the text is pasted.
  onPaste(event) {
    const files = [...(event.clipboardData?.files || [])];
    if (!files.length || event.clipboardData.types.includes("text/plain")) return;
    if (document.querySelector("dialog[open]")) return;
    event.preventDefault();
    this.attachments.addFiles(files);
    this.text.focus();
  }

  acceptDrops() {
    const cover = document.querySelector("#drop-cover");
    let depth = 0;
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    const enter = (step) => (event) => {
      if (!hasFiles(event)) return;
      depth = Math.max(0, depth + step);
      cover.hidden = depth === 0;
    };
    document.addEventListener("dragenter", enter(1));
    document.addEventListener("dragleave", enter(-1));
    document.addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
    document.addEventListener("drop", (event) => {
      depth = 0;
      cover.hidden = true;
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.attachments.addFiles([...event.dataTransfer.files]);
      this.text.focus();
    });
  }

  submit() {
    if (this.busy) {
      this.actions.stop();
      return;
    }
    const text = this.text.value.trim();
    if (!text && !this.attachments.items.length) return;
    const { editing } = this;
    this.text.value = "";
    const items = this.attachments.take();
    this.endEdit();
    this.actions.send(text, items, editing);
  }

  // Put an earlier question back into the form. What is sent then is another version of it.
  edit(node, items) {
    this.editing = node;
    this.text.value = node.text;
    this.attachments.replace(items);
    this.form.querySelector("#editing").hidden = false;
    this.show();
    this.text.focus();
  }

  cancelEdit() {
    this.text.value = "";
    this.attachments.replace([]);
    this.endEdit();
    this.text.focus();
  }

  endEdit() {
    this.editing = null;
    this.form.querySelector("#editing").hidden = true;
    this.show();
  }

  // busy: whether an answer arrives now; the button stops it then.
  setBusy(busy) {
    this.busy = busy;
    this.show();
  }

  show() {
    const label = this.busy ? "Stop" : "Send";
    if (this.button.getAttribute("aria-label") !== label) {
      this.button.setAttribute("aria-label", label);
      this.button.title = this.busy ? "Stop (Esc)" : "Send (Enter)";
      this.button.replaceChildren(icon(this.busy ? "stop" : "send"));
    }
    this.button.disabled = !this.busy && !this.text.value.trim() && !this.attachments.items.length;
    this.text.style.height = "auto";
    this.text.style.height = `${Math.min(this.text.scrollHeight + 2, 240)}px`;
  }
}
