"use strict";
// Sorting and filtering of the tables that ask for it; without scripts they are plain tables.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const value = (row, place) => {
    const cell = row.cells[place];
    return cell.dataset.value === undefined ? cell.textContent.trim() : cell.dataset.value === "" ? NaN : Number(cell.dataset.value);
  };
  table.querySelectorAll("th button").forEach((button, place) => {
    button.addEventListener("click", () => {
      const head = button.parentElement;
      const down = head.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("th").forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].sort((one, other) => {
        const a = value(one, place), b = value(other, place);
        if (typeof a === "number") {
          if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b);  // unknown ones last
          return down ? b - a : a - b;
        }
        return down ? b.localeCompare(a) : a.localeCompare(b);
      });
      body.append(...rows);
    });
  });
}
const filter = document.querySelector("#filter");
if (filter) {
  const shown = document.querySelector("#shown");
  const same = document.querySelector("#same")?.textContent ?? "";  // what every row would say
  filter.hidden = false;
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of document.querySelectorAll("table.sortable tbody tr")) {
      const text = `${row.textContent} ${same}`.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      const section = document.getElementById(row.dataset.run);
      if (section) section.hidden = row.hidden;
      count += !row.hidden;
    }
    shown.textContent = `${count} of ${document.querySelectorAll("table.sortable tbody tr").length} runs`;
  });
}
