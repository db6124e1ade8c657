"use strict";
// The rows of a cell of the confusion matrix, and the row of a mark of the map.
(() => {
  const figures = JSON.parse(document.getElementById("metrics").textContent);
  const rows = figures.predictions;
  if (!rows) return;
  const names = figures.classes.map((each) => String(each.name));
  const MOST_LISTED = 200;

  // Control characters are shown escaped; text from outside is never parsed as markup.
  const show = (text) => String(text).replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (each) => "\\u" + each.codePointAt(0).toString(16).padStart(4, "0"));
  const make = (name, ...texts) => {
    const element = document.createElement(name);
    element.append(...texts);
    return element;
  };
  const nameRow = (at) => {
    const id = rows.id ? show(rows.id[at]) + " (" + rows.location[at] + ")" : rows.location[at];
    return id;
  };
  const nameCells = (at) => rows.columns.map((name, column) => show(name) + " = " + (show(rows.cells[column][at]) || "(missing)")).join(", ");
  const percent = (share) => (100 * share).toFixed(1) + " %";

  // Of buttons of which one alone is in the order of Tab, arrow keys reach the others.
  const rove = (buttons, step) => {
    buttons.forEach((button, at) => {
      button.tabIndex = at ? -1 : 0;
      button.addEventListener("keydown", (event) => {
        const to = step(at, event.key);
        if (to === undefined) return;
        event.preventDefault();
        if (!buttons[to]) return;
        buttons.forEach((each) => { each.tabIndex = -1; });
        buttons[to].tabIndex = 0;
        buttons[to].focus();
      });
    });
  };
  const press = (buttons, pressed) => buttons.forEach((each) => each.setAttribute("aria-pressed", String(each === pressed)));

  const cells = [...document.querySelectorAll("#confusion td button")];
  const behind = document.getElementById("behind");
  const place = cells.map((cell) => [Number(cell.dataset.given), Number(cell.dataset.taken)]);
  const nearest = (at, down, across) => {
    let best, least = Infinity;
    place.forEach(([y, x], other) => {
      const dy = (y - place[at][0]) * (down || 1), dx = (x - place[at][1]) * (across || 1);
      const ahead = down ? dy : dx, aside = Math.abs(down ? dx : dy);
      if (ahead > 0 && ahead + 3 * aside < least) { least = ahead + 3 * aside; best = other; }
    });
    return best === undefined ? at : best;
  };
  const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  rove(cells, (at, key) => (key === "Home" ? 0 : key === "End" ? cells.length - 1 : ARROWS[key] && nearest(at, ...ARROWS[key])));
  cells.forEach((cell, number) => cell.addEventListener("click", () => {
    const [given, taken] = place[number];
    const found = rows.index.map((_, at) => at).filter((at) => rows.label[at] === given && rows.predicted[at] === taken);
    const list = make("ul", ...found.slice(0, MOST_LISTED).map((at) => make("li", make("strong", nameRow(at)), ", " + percent(rows.probability[at]) + " probability: " + nameCells(at))));
    const told = Number(cell.textContent);
    const some = found.length < told || found.length > MOST_LISTED ? " (" + Math.min(found.length, MOST_LISTED) + " of them listed)" : "";
    const what = given === taken ? " rows of " + show(names[given]) + " that are predicted correctly" : " rows of " + show(names[given]) + " that are predicted as " + show(names[taken]);
    behind.replaceChildren(make("p", told + what + some + ":"), list);
    press(cells, cell);
  }));

  const map = document.getElementById("points");
  const marks = [...map.querySelectorAll("path")];
  const told = document.getElementById("told");
  const order = [...marks].sort((a, b) => rows.x[a.dataset.row] - rows.x[b.dataset.row]);
  let current = -1;
  const point = (mark) => {
    const at = Number(mark.dataset.row);
    marks.forEach((each) => each.classList.toggle("at", each === mark));
    current = order.indexOf(mark);
    const right = rows.label[at] === rows.predicted[at];
    const verdict = right ? ", predicted correctly: " : ", predicted as " + show(names[rows.predicted[at]]) + ": ";
    told.replaceChildren(make("strong", nameRow(at)), ": " + show(names[rows.label[at]]) + verdict + percent(rows.probability[at]) + " probability. " + nameCells(at));
  };
  map.addEventListener("pointerover", (event) => { if (event.target.dataset.row) point(event.target); });
  map.addEventListener("click", (event) => { if (event.target.dataset.row) point(event.target); });
  map.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const shown = order.filter((mark) => !map.classList.contains("chosen") || mark.classList.contains("on"));
    if (!shown.length) return;
    const to = shown.indexOf(order[current]) + step;
    point(shown[(to + shown.length) % shown.length]);
  });

  const legend = [...document.querySelectorAll(".legend button")];
  rove(legend, (at, key) => ({ ArrowLeft: at - 1, ArrowUp: at - 1, ArrowRight: at + 1, ArrowDown: at + 1, Home: 0, End: legend.length - 1 })[key]);
  legend.forEach((button) => button.addEventListener("click", () => {
    const chosen = button.getAttribute("aria-pressed") !== "true";
    press(legend, chosen ? button : null);
    map.classList.toggle("chosen", chosen);
    marks.forEach((mark) => mark.classList.toggle("on", chosen && rows.label[mark.dataset.row] === Number(button.dataset.number)));
  }));
})();
