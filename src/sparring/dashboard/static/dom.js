// Small things that all parts of the page need. What comes from the server reaches the document as text only.

const ROWS = 7; // of a table before "show all"
const expanded = new Set();

export const $ = (id) => document.getElementById(id);

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// An element that is there only while it has something to say.
export function tell(element, text) {
  element.hidden = !text;
  say(element, text ?? "");
}

// Rows of a table, made from a template once and then only rewritten where a text changed.
export function fill(id, rows, write, limit = ROWS) {
  const body = $(id).tBodies[0];
  const visible = expanded.has(id) ? rows : rows.slice(0, limit);
  while (body.rows.length > visible.length) body.deleteRow(-1);
  while (body.rows.length < visible.length) body.append($(`${id}-row`).content.cloneNode(true));
  visible.forEach((row, i) => {
    const cell = (name, text) => {
      const element = body.rows[i].getElementsByClassName(name)[0];
      if (text !== undefined) say(element, text);
      return element;
    };
    write(cell, row);
  });
  const more = $(`${id}-more`);
  if (!more) return;
  more.hidden = rows.length <= limit;
  say(more, expanded.has(id) ? "show fewer" : `show all ${rows.length}`);
}

export function expandable(ids, paint) {
  for (const id of ids) {
    $(`${id}-more`).addEventListener("click", () => {
      if (!expanded.delete(id)) expanded.add(id);
      paint();
    });
  }
}

// Exactly these children, each made or kept by `make(key, element)`.
export function list(parent, keys, make) {
  while (parent.childElementCount > keys.length) parent.lastElementChild.remove();
  keys.forEach((key, i) => {
    const made = make(key, parent.children[i]);
    if (!parent.children[i]) parent.append(made);
  });
}

// "you added `shield`": names stand in a type of their own.
export function quoted(line, text) {
  if (line.dataset.text === text) return line;
  line.dataset.text = text;
  const code = (name) => Object.assign(document.createElement("code"), { textContent: name });
  line.replaceChildren(...text.split("`").map((part, i) => (i % 2 ? code(part) : part)));
  return line;
}

export class Problem extends Error {}

export async function getJson(path, onAnswer) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(10_000) });
  onAnswer?.(answer);
  if (!answer.ok) throw new Problem(`the server answered ${answer.status}`);
  return answer.json();
}

// A change: the server's reason when it refuses.
export async function change(method, path, body) {
  const answer = await fetch(path, {
    method,
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal: AbortSignal.timeout(60_000),
  });
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Problem(found.detail ?? `the server answered ${answer.status}`);
  return found;
}
