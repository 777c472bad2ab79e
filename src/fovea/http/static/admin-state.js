// What both pages for operators show at their top: the state of the server or gateway, and a notice.

const title = document.title;

export const find = (id) => document.getElementById(id);

/** Show a text, unless it is there already: a screen reader would read it again. */
export function write(id, text) {
  const element = find(id);
  if (element.textContent !== text) element.textContent = text;
}

export function setState(tone, word) {
  find("state").className = `chip ${tone}`;
  find("state").firstElementChild.className = `dot ${tone}`;
  write("state-text", word);
  document.title = word === "ready" ? title : `${word} · ${title}`;
}

export function showNotice(tone, text) {
  find("notice").className = `notice ${tone}`;
  find("notice").hidden = !text;
  write("notice", text);
}
