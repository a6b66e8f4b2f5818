// A click on the head of a column, or Enter or the space bar there, sorts the table by it; again, the other way round.
"use strict";

const UNMARKED = /^[^\p{L}\d.-]+/u; // "≤ 8 %" begins with a number, "at most 8 %" does not

function number(text) {
  return parseFloat(text.replaceAll(",", "").replace("\u2212", "-").replace(UNMARKED, ""));
}

// Numbers come before text, which is sorted by the alphabet.
function compare(a, b) {
  const [x, y] = [number(a), number(b)];
  if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || a.localeCompare(b);
  return x - y;
}

function sort(table, head, column) {
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const text = (row) => row.cells[column].textContent.trim();
  const rows = [...table.tBodies[0].rows].sort((a, b) => {
    if (!text(a) || !text(b)) return !text(a) - !text(b); // empty cells come last
    return (down ? -1 : 1) * compare(text(a), text(b));
  });
  table.tBodies[0].append(...rows);
}

for (const table of document.querySelectorAll("table.docutils")) {
  const row = table.tHead && table.tHead.rows.length === 1 && table.tHead.rows[0];
  const body = row && table.tBodies.length === 1 && [...table.tBodies[0].rows];
  if (!body || body.length < 3 || body.some((line) => line.cells.length !== row.cells.length)) continue;
  [...row.cells].forEach((head, column) => {
    if (!head.textContent.trim()) return;
    const button = document.createElement("button");
    button.title = "Sort by this column";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(table, head, column));
    head.append(button);
    head.scope = "col";
  });
}

// Code in a cell may break behind a bracket or a comma.
for (const code of document.querySelectorAll("td code .pre")) {
  const parts = code.textContent.split(/(?<=[(,](?!\)))/);
  code.replaceChildren(...parts.flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part])));
}

// A click on a picture shows it in full.
for (const picture of document.querySelectorAll("article img:not(a img)")) {
  const link = document.createElement("a");
  link.href = picture.src;
  picture.replaceWith(link);
  link.append(picture);
}

// A table or a block of code that is wider than the page scrolls, by the keyboard too.
for (const box of document.querySelectorAll(".table-wrapper, .cell_output .output, .highlight pre")) {
  if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
}
