// The choice of pages of a PDF file.

const MOST = 16;

// Ask in a dialog with the inputs "first" and "last" which of so many pages to use. Resolves with [first, last], or
// with null.
export function choosePages(dialog, name, pages) {
  const form = dialog.querySelector("form");
  dialog.querySelector("[data-name]").textContent = `${name} has ${pages} pages.`;
  form.elements.first.value = 1;
  form.elements.last.value = Math.min(4, pages);
  form.elements.last.max = pages;
  dialog.showModal();
  return new Promise((resolve) => {
    const end = new AbortController();
    const finish = (range) => {
      end.abort();
      if (dialog.open) dialog.close();
      resolve(range);
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const [first, last] = [Number(form.elements.first.value), Number(form.elements.last.value)];
      const wrong = !(first >= 1 && last >= first && last - first < MOST);
      form.elements.last.setCustomValidity(wrong ? `Choose at most ${MOST} pages, the last one not before the first.` : "");
      if (form.reportValidity()) finish([first, last]);
    }, { signal: end.signal });
    form.elements.last.addEventListener("input", () => form.elements.last.setCustomValidity(""), { signal: end.signal });
    for (const button of dialog.querySelectorAll("[data-cancel]")) {
      button.addEventListener("click", () => finish(null), { signal: end.signal });
    }
    dialog.addEventListener("close", () => finish(null), { signal: end.signal });
  });
}
