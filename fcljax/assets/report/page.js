"use strict";
// Tables sort by a click on a column's name and copy as CSV and LaTeX; curves are switched on and off.
(function () {
  const status = document.getElementById("status");
  const value = (cell) => cell.dataset.v ?? cell.textContent.replace(/\s*\u2195?$/, "");
  const rowsOf = (table) => [...table.rows].map((row) => [...row.cells].map(value));

  // Of "71.20 ± 0.4" and "1,234" the first number; NaN of a text.
  function number(text) {
    return /^[+\-]?[\d.]/.test(text) ? parseFloat(text.replace(/,/g, "")) : NaN;
  }

  function compare(a, b) {
    const x = number(a), y = number(b);
    if (!Number.isNaN(x) && !Number.isNaN(y)) return x - y;
    return a.localeCompare(b, "en", { numeric: true });
  }

  function sort(table, column, head) {
    const up = head.getAttribute("aria-sort") !== "ascending";
    const empty = (text) => text === "-" || text === "";
    const body = table.tBodies[0];
    const rows = [...body.rows].sort(function (one, two) {
      const a = value(one.cells[column]), b = value(two.cells[column]);
      if (empty(a) || empty(b)) return empty(a) - empty(b);
      return up ? compare(a, b) : compare(b, a);
    });
    body.append(...rows);
    for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    status.textContent = `Sorted by ${head.textContent}, ${up ? "ascending" : "descending"}`;
  }

  function csv(table) {
    const field = (text) => (/[",\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text);
    return rowsOf(table).map((row) => row.map(field).join(",")).join("\n") + "\n";
  }

  function latex(table) {
    const marks = { "\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "±": "$\\pm$" };
    const plain = (text) => text.replace(/[\\~^±&%$#_{}]/g, (c) => marks[c] ?? "\\" + c);
    const [head, ...body] = [...table.rows].map((row) => [...row.cells].map((cell) => plain(cell.textContent)));
    const line = (row) => "  " + row.join(" & ") + " \\\\";
    return [
      `\\begin{tabular}{l${"r".repeat(head.length - 1)}}`, "  \\toprule", line(head), "  \\midrule",
      ...body.map(line), "  \\bottomrule", "\\end{tabular}", "",
    ].join("\n");
  }

  // Where the clipboard is closed to the page, the text is shown for the user to take.
  function copied(text, what, box) {
    const done = () => (status.textContent = `Copied ${what}`);
    const shown = function () {
      const area = box.querySelector("textarea") ?? document.createElement("textarea");
      area.setAttribute("aria-label", `${what}, to be copied by hand`);
      area.value = text;
      box.append(area);
      area.focus();
      area.select();
      if (document.execCommand("copy")) {
        area.remove();
        done();
      } else status.textContent = "The browser does not let this page copy; the text is marked below the table";
    };
    if (navigator.clipboard) navigator.clipboard.writeText(text).then(done, shown);
    else shown();
  }

  function button(name, label, act) {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = name;
    if (label) made.setAttribute("aria-label", label);
    made.addEventListener("click", act);
    return made;
  }

  for (const table of document.querySelectorAll("table")) {
    const box = table.closest(".box"), caption = table.caption.textContent;
    const tools = document.createElement("div");
    tools.className = "tools";
    tools.append(
      button("Copy CSV", `Copy CSV: ${caption}`, () => copied(csv(table), "CSV", box)),
      button("Copy LaTeX", `Copy LaTeX: ${caption}`, () => copied(latex(table), "LaTeX", box)),
    );
    box.prepend(tools);
    [...table.tHead.rows[0].cells].forEach(function (head, column) {
      const made = button(head.textContent, "", () => sort(table, column, head));
      head.replaceChildren(made);
      head.setAttribute("aria-sort", "none");
    });
  }

  document.querySelectorAll(".command").forEach(function (box, place) {
    const text = box.querySelector("code").textContent;
    const tools = document.createElement("div");
    tools.className = "tools";
    tools.append(button("Copy", `Copy command ${place + 1}`, () => copied(text, "the command", box)));
    box.prepend(tools);
  });

  for (const legend of document.querySelectorAll(".switches")) {
    const figure = legend.closest("figure");
    [...legend.children].forEach(function (entry, place) {
      const made = button("", "", function () {
        const shown = made.getAttribute("aria-pressed") === "true";
        for (const drawn of figure.querySelectorAll(`.c${place}`)) drawn.classList.toggle("off", shown);
        made.setAttribute("aria-pressed", String(!shown));
      });
      made.append(...entry.childNodes);
      made.setAttribute("aria-pressed", "true");
      entry.append(made);
    });
  }
})();
