// A table whose rows stay the same elements while their values change, so that selection and focus stay.

/**
 * One table.
 * columns: [{head, value, kind}]. value: returns the text or the node of a row's cell.
 *   kind: "" for text, "number" or "key"; a "key" cell is the row's header.
 * keyOf: returns what names a row.
 */
export class Table {
  constructor(table, columns, keyOf) {
    this.columns = columns;
    this.keyOf = keyOf;
    this.rows = new Map();
    this.body = table.createTBody();
    const head = table.createTHead().insertRow();
    for (const { head: text, kind } of columns) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = text;
      if (kind === "number") cell.className = "number";
      head.append(cell);
    }
    this.empty = table.parentElement.querySelector("[data-empty]");
    this.table = table;
  }

  render(rows) {
    const seen = new Set();
    rows.forEach((row, index) => {
      const key = String(this.keyOf(row));
      seen.add(key);
      let found = this.rows.get(key);
      if (!found) {
        found = this.add();
        this.rows.set(key, found);
      }
      this.columns.forEach(({ value }, column) => update(found.cells[column], value(row)));
      if (this.body.children[index] !== found) this.body.insertBefore(found, this.body.children[index] ?? null);
    });
    for (const [key, row] of this.rows) {
      if (!seen.has(key)) {
        row.remove();
        this.rows.delete(key);
      }
    }
    this.table.hidden = rows.length === 0;
    this.empty.hidden = rows.length > 0;
  }

  add() {
    const row = document.createElement("tr");
    for (const { kind } of this.columns) {
      const cell = document.createElement(kind === "key" ? "th" : "td");
      if (kind === "key") cell.scope = "row";
      if (kind === "number") cell.className = "number";
      row.append(cell);
    }
    return row;
  }
}

function update(cell, value) {
  if (value instanceof Node) {
    if (!cell.firstChild || !cell.firstChild.isEqualNode(value)) cell.replaceChildren(value);
  } else if (cell.textContent !== value) {
    cell.textContent = value;
  }
}

/** An element with a class and children: nodes, or texts. */
export function element(name, style, ...children) {
  const made = document.createElement(name);
  if (style) made.className = style;
  made.append(...children);
  return made;
}

/** A bar that is filled to a share from 0 to 1. It is decoration: the text beside it says the same. */
export function bar(share, tone) {
  const fill = element("span", `fill ${tone}`);
  fill.style.width = `${(100 * Math.max(0, Math.min(1, share))).toFixed(1)}%`;
  const made = element("span", "bar", fill);
  made.setAttribute("aria-hidden", "true");
  return made;
}
