"use strict";
// The face of the desk: one question at a time, and what was learned; the server keeps everything that matters.
(() => {
  const token = new URLSearchParams(location.search).get("token") || "";
  const tab = [...crypto.getRandomValues(new Uint8Array(12))].map((each) => each.toString(16).padStart(2, "0")).join("");
  const get = (id) => document.getElementById(id);
  const COLOURS = 10, MOST_LISTED = 60, MOST_MARKED = 200;
  let state, question, busy = false, done = [], figures, names = [], words = [];

  // Control characters are shown as what they are; nothing that came from outside is ever taken for markup.
  const show = (text) => String(text).replace(/[^\P{C}\n]|[\p{Zl}\p{Zp}]/gu, (each) => "\\u" + each.codePointAt(0).toString(16).padStart(4, "0"));
  const make = (name, own, ...children) => {
    const element = document.createElement(name);
    Object.entries(own || {}).forEach(([key, value]) => (key in element ? (element[key] = value) : element.setAttribute(key, value)));
    element.append(...children);
    return element;
  };
  const bdi = (text) => make("bdi", {}, show(text));
  const percent = (share, digits = 0) => (100 * share).toFixed(digits) + " %";

  const api = async (path, body, headers) => {
    const own = { Authorization: "Bearer " + token, ...headers };
    const options = body === undefined ? { headers: own } : { method: "POST", headers: own, body };
    let answer;
    try {
      answer = await fetch(path, { ...options, cache: "no-store" });
    } catch {
      throw new Error("The server does not answer. Every answer that it took is kept: start the same command again.");
    }
    const told = await answer.json();
    if (!answer.ok) throw new Error(told.error);
    return told;
  };
  const post = (path, own) => api(path, JSON.stringify({ tab, ...own }), { "Content-Type": "application/json" });
  const fail = (error) => { get("error").textContent = show(error.message); get("error").hidden = false; };
  const guarded = (work) => async (...given) => {
    try { await work(...given); get("error").hidden = true; } catch (error) { fail(error); }
  };

  const draw = (row, cells, large) => {
    const parts = [];
    if (state.picture !== null) parts.push(make("img", { src: "picture?row=" + row + "&token=" + encodeURIComponent(token), alt: "The picture of row " + row }));
    const rest = state.header.map((name, at) => [name, cells[at], at]).filter(([, , at]) => at !== state.picture);
    if (large && state.texts) return [...parts, make("p", { className: "text", dir: "auto" }, show(cells[state.header.indexOf(state.used[0])]))];
    const pairs = rest.flatMap(([name, cell]) => [make("dt", {}, bdi(name)), make("dd", { dir: "auto" }, show(cell) || "(gap)")]);
    return rest.length ? [...parts, make("dl", { className: "cells" }, ...pairs)] : parts;
  };
  const card = (row, cells, ...more) => make("li", {}, ...draw(row, cells, false), ...more);
  const list = (likely) => {
    const rows = likely.map((each) => make("tr", {}, make("th", { scope: "row" }, bdi(each.name)), make("td", { className: "number" }, percent(each.probability, 1))));
    return make("table", {}, make("tbody", {}, ...rows));
  };

  // Label: keys are dead until the next question is there.
  const tell = (told) => {
    names = told.classes.map((each) => each.name);
    get("far").textContent = told.answered + " answered, " + told.left + " left" + (told.flagged ? ", " + told.flagged + " flagged" : "");
  };
  const ask = (told) => {
    question = told;
    tell(told);
    const ended = told.row === null;
    get("reason").textContent = ended ? "No row is left." : "Row " + told.row + ": " + show(told.reason);
    get("question").replaceChildren(...(ended ? [] : draw(told.row, told.cells, true)));
    get("keys").replaceChildren(...(ended ? [] : told.likely).map((each, at) => {
      const share = each.probability === null ? [] : [make("span", { className: "unit" }, percent(each.probability))];
      const key = make("kbd", {}, String(at + 1));
      return make("li", {}, make("button", { type: "button", onclick: () => give(each.name) }, key, bdi(each.name), ...share));
    }));
    get("near").replaceChildren(...(ended ? [] : told.near).map((each) => card(each.row, each.cells, make("p", {}, make("strong", {}, bdi(each.name))))));
    get("beside").hidden = ended || !told.near.length;
    for (const id of ["skip", "flag"]) get(id).disabled = ended;
    get("add").hidden = ended;
    get("undo").disabled = !done.length;
  };
  const step = guarded(async (path, own, after) => {
    if (busy) return;
    busy = true;
    try {
      const told = await post(path, own);
      if (after) after();
      ask(told);
    } finally { busy = false; }
  });
  const give = (name) => question && question.row !== null && step("api/answer", { row: question.row, name }, remember(question.row));
  const remember = (row) => () => done.push(row);
  const leave = (path) => question && question.row !== null && step(path, { row: question.row }, remember(question.row));
  const undo = () => done.length && step("api/undo", { row: done[done.length - 1] }, () => done.pop());
  get("skip").onclick = () => leave("api/skip");
  get("flag").onclick = () => leave("api/flag");
  get("undo").onclick = undo;
  get("add").onsubmit = (event) => {
    event.preventDefault();
    const name = get("new").value;
    get("new").value = "";
    get("new").blur();
    give(name);
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || get("label").hidden) return;
    if (event.target.matches("input, textarea, select")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const at = "123456789".indexOf(event.key);
    const keys = { s: () => get("skip").click(), u: undo, f: () => get("flag").click(), n: () => get("new").focus() };
    if (event.key.length === 1 && at >= 0 && question && question.row !== null && question.likely[at]) give(question.likely[at].name);
    else if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  addEventListener("pagehide", () => {
    fetch("api/leave", { method: "POST", keepalive: true, headers: { Authorization: "Bearer " + token }, body: JSON.stringify({ tab }) }).catch(() => {});
  });

  // Look.
  const rowsOf = async (rows) => (rows.length ? post("api/rows", { rows: rows.slice(0, MOST_LISTED) }) : []);
  const mend = (row, name, card) => guarded(async () => {
    tell(await post("api/mend", { row, name }));
    card.replaceChildren(make("p", {}, "Row " + row + " is ", bdi(name), " now."));
    card.tabIndex = -1;
    card.focus();
  })();
  const offer = (row, cells, text, first) => {
    const own = card(row, cells, make("p", {}, ...text));
    const keys = [first, ...names.filter((name) => name !== first)].map((name, at) => make("button", { type: "button", onclick: () => mend(row, name, own) }, make("kbd", {}, at < 9 ? at + 1 + " " : ""), bdi(name)));
    own.append(make("div", { className: "row" }, ...keys));
    own.addEventListener("keydown", (event) => { const key = keys["123456789".indexOf(event.key)]; if (key && event.key.length === 1) key.click(); });
    return own;
  };
  const tile = (name, value, more) => make("div", {}, make("dt", {}, name), make("dd", {}, value), make("dd", { className: "more" }, more));
  const fill = async (told) => {
    figures = told.figures;
    const { accuracy, interval, confusion, places } = figures;
    const rows = figures.data.rows;
    if (accuracy === undefined || accuracy === null) {
      get("tiles").replaceChildren(tile("right", "not known yet", "no class has two answers: none could be held out"));
      return;
    }
    const own = figures.classes.map((each) => String(each.name));
    const span = interval.map((each) => (100 * each).toFixed(1)).join(" to ") + " %";
    get("tiles").replaceChildren(tile("right, held out", percent(accuracy, 1), "95 %: " + span), tile("balanced accuracy", percent(figures.balanced_accuracy, 1), "the mean over classes"), tile("answers", rows, told.fresh ? "all of them" : "there are more by now"));
    const head = make("tr", {}, make("th", {}, "given"), ...own.map((name) => make("th", { scope: "col" }, make("span", {}, bdi(name)))));
    const list = figures.rows || { index: [], label: [], predicted: [], probability: [] };
    const most = Math.max(1, ...confusion.flat());
    const lines = confusion.map((line, given) => make("tr", {}, make("th", { scope: "row" }, bdi(own[given])), ...line.map((n, taken) => {
      if (!n) return make("td");
      const look = guarded(async () => {
        const at = list.row.map((_, each) => each).filter((each) => list.label[each] === given && list.predicted[each] === taken);
        const found = await rowsOf(at.map((each) => places[list.index[each]]));
        get("behind").replaceChildren(...found.map((each, place) => offer(each.row, each.cells, ["given as ", bdi(own[given]), ", taken for ", bdi(own[taken]), " (" + percent(list.probability[at[place]]) + ")"], own[taken])));
      });
      const button = make("button", { type: "button", className: "h" + Math.ceil((5 * n) / most), onclick: look, "aria-label": n + " of " + own[given] + " taken for " + own[taken] }, String(n));
      return make("td", {}, button);
    })));
    get("matrix").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...lines)));
    get("behind").replaceChildren();
    const doubtful = (figures.suspects || []).filter((each) => each.score > 0);
    const found = await rowsOf(doubtful.map((each) => places[each.index]));
    const text = (each) => ["given as ", bdi(own[each.label]), ", believed to be ", bdi(own[each.suggested]), " (" + percent(each.suggested_probability) + ")"];
    get("suspects").replaceChildren(...found.map((each, at) => offer(each.row, each.cells, text(doubtful[at]), own[doubtful[at].suggested])));
    if (!found.length) get("suspects").append(make("li", {}, "None does."));
  };
  const WORDS = { look: "Working the figures out ...", take: "Making the model ..." };
  const follow = async (told) => {
    for (const id of ["working", "making"]) get(id).textContent = told.running ? WORDS[told.running] : "";
    for (const id of ["work", "make"]) get(id).disabled = Boolean(told.running);
    tell(told);
    if (told.running) {
      setTimeout(guarded(async () => follow(await api("api/jobs"))), 400);
      return;
    }
    if (told.figures) await fill(told);
    const files = { model: "the model", report: "its report", predictions: "predictions for all rows", labelled: "the labelled table" };
    get("files").replaceChildren(...[...told.ready, "labelled"].map((name) => make("li", {}, make("a", { href: "take?file=" + name + "&token=" + encodeURIComponent(token), download: "" }, files[name]))));
    if (told.error) throw new Error(told.error);
  };
  const start = guarded(async (what) => follow(await post("api/jobs", { what })));
  get("work").onclick = () => start("look");
  get("make").onclick = () => start("take");

  // The map: a canvas, as there may be a hundred thousand rows.
  let points, order, at = -1, only = -1;
  const paint = () => {
    const canvas = get("map"), pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const colours = Array.from({ length: COLOURS }, (_, each) => style.getPropertyValue("--c" + each));
    pen.clearRect(0, 0, canvas.width, canvas.height);
    const size = points.x.length > 5000 ? 2 : 5, chosen = new Set(picked);
    points.x.forEach((_, each) => {
      const [x, y] = place(each);
      pen.globalAlpha = only >= 0 && points.taken[each] !== only ? 0.06 : 0.75;
      pen.fillStyle = colours[points.taken[each] % COLOURS];
      pen.fillRect(x - size / 2, y - size / 2, size, size);
      if (chosen.has(points.row[each])) { pen.strokeStyle = style.getPropertyValue("--accent"); pen.globalAlpha = 1; pen.strokeRect(x - 6, y - 6, 12, 12); }
      if (points.given[each] >= 0) { pen.strokeStyle = style.getPropertyValue("--ink"); pen.globalAlpha = 1; pen.strokeRect(x - 4, y - 4, 8, 8); }
    });
    pen.globalAlpha = 1;
    if (at >= 0) { const [x, y] = place(at); pen.lineWidth = 3; pen.strokeStyle = style.getPropertyValue("--accent"); pen.strokeRect(x - 8, y - 8, 16, 16); pen.lineWidth = 1; }
  };
  matchMedia("(prefers-color-scheme: dark)").onchange = () => points && paint();
  const place = (each) => [20 + 420 * (points.x[each] + 1), 20 + 280 * (1 - points.y[each])];
  const point = guarded(async (to) => {
    at = to;
    paint();
    const [found] = await rowsOf([points.row[to]]);
    const given = points.given[to] < 0 ? "not labelled" : ["given as ", bdi(points.names[points.given[to]])];
    get("told").replaceChildren(...draw(found.row, found.cells, false), make("p", {}, "Row " + found.row + ", taken for ", bdi(points.names[points.taken[to]]), ", ", ...[given].flat()));
  });
  get("draw").onclick = guarded(async () => {
    points = await api("api/map");
    order = points.x.map((_, each) => each).sort((one, other) => points.x[one] - points.x[other]);
    at = only = -1;
    picked = [];
    get("outlined").hidden = true;
    get("lasso").hidden = false;
    get("legend").replaceChildren(...points.names.map((name, number) => {
      const dot = make("i");
      dot.style.background = "var(--c" + (number % COLOURS) + ")";
      const button = make("button", { type: "button", "aria-pressed": "false" }, dot, bdi(name));
      button.onclick = () => {
        only = only === number ? -1 : number;
        get("legend").querySelectorAll("button").forEach((each, own) => each.setAttribute("aria-pressed", String(own === only)));
        paint();
      };
      return make("li", {}, button);
    }));
    paint();
  });
  const nearest = (x, y) => {
    let best = 0, least = Infinity;
    points.x.forEach((_, each) => { const [px, py] = place(each), far = (px - x) ** 2 + (py - y) ** 2; if (far < least) { least = far; best = each; } });
    return best;
  };
  get("map").onkeydown = (event) => {
    if (event.key === " " && points && at >= 0) {
      event.preventDefault();
      const row = points.row[at];
      pick(picked.includes(row) ? picked.filter((each) => each !== row) : [...picked, row]);
      return;
    }
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!step || !points) return;
    event.preventDefault();
    point(order[(order.indexOf(at) + step + order.length) % order.length]);
  };

  // What is outlined on the map, or picked by the space bar: labelled or flagged together.
  let picked = [];
  const offerMarks = guarded(async () => {
    const found = await rowsOf(picked), free = picked.slice(0, MOST_MARKED);
    get("outlined").hidden = !picked.length;
    get("many").textContent = (picked.length === 1 ? "1 row is picked" : picked.length + " rows are picked") + (picked.length > MOST_MARKED ? ", the first " + MOST_MARKED + " of them for a button" : "") + ". Rows that have an answer keep it.";
    const mark = (name) => guarded(async () => {
      ask(await post("api/mark", { rows: free, name }));
      for (const row of free) {
        const each = points.row.indexOf(row);
        if (name !== null && points.given[each] < 0) points.given[each] = points.names.indexOf(name);
      }
      picked = [];
      paint();
      await offerMarks();
      get("told").textContent = free.length + " rows: " + (name === null ? "flagged" : show(name));
      get("map").focus();
    });
    const buttons = names.map((name) => make("button", { type: "button", onclick: mark(name) }, bdi(name)));
    const own = make("input", { id: "other", maxLength: 100, dir: "auto", autocomplete: "off" });
    const form = make("form", { onsubmit: (event) => { event.preventDefault(); mark(own.value)(); } }, make("label", { htmlFor: "other" }, "Another class "), own, " ", make("button", {}, "Give it"));
    get("marks").replaceChildren(...buttons, form, make("button", { type: "button", onclick: mark(null) }, "Flag them"));
    get("inside").replaceChildren(...found.map((each) => card(each.row, each.cells)));
  });
  const pick = (rows) => { picked = rows; paint(); return offerMarks(); };
  const inside = (x, y, line) => {
    let within = false;
    line.forEach(([ax, ay], each) => {
      const [bx, by] = line[(each + line.length - 1) % line.length];
      if (ay > y !== by > y && x < ax + ((bx - ax) * (y - ay)) / (by - ay)) within = !within;
    });
    return within;
  };
  let line = null;
  const where = (event) => {
    const box = get("map").getBoundingClientRect(), scale = 880 / box.width;
    return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
  };
  get("lasso").onclick = () => {
    const on = get("lasso").getAttribute("aria-pressed") !== "true";
    get("lasso").setAttribute("aria-pressed", String(on));
    get("map").style.touchAction = on ? "none" : "";
  };
  get("map").onpointerdown = (event) => {
    if (!points || !event.isPrimary || (event.pointerType === "touch" && get("lasso").getAttribute("aria-pressed") !== "true")) return;
    line = [where(event)];
    get("map").setPointerCapture(event.pointerId);
  };
  get("map").onpointermove = (event) => {
    if (!line) return;
    line.push(where(event));
    const pen = get("map").getContext("2d"), [from, to] = line.slice(-2);
    pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent");
    pen.beginPath();
    pen.moveTo(...from);
    pen.lineTo(...to);
    pen.stroke();
  };
  get("map").onpointercancel = () => { line = null; };
  get("map").onpointerup = (event) => {
    if (!line) return;
    const own = line, [[x, y]] = own, far = Math.max(...own.map(([px, py]) => Math.hypot(px - x, py - y)));
    line = null;
    if (far < 8) { point(nearest(...where(event))); return; }
    pick(points.row.filter((_, each) => (only < 0 || points.taken[each] === only) && inside(...place(each), own)));
  };

  // Try.
  const judge = guarded(async (body, media) => {
    const told = await api("api/try", body, { "Content-Type": media });
    const parts = told.support.map((each) => make("tr", {}, make("th", { scope: "row" }, bdi(each.name)), make("td", { className: "number" }, (each.support > 0 ? "+" : "") + each.support.toFixed(2))));
    const spoke = parts.length ? [make("h2", {}, "What speaks for it"), make("p", { className: "soft" }, "By how much its log-probability exceeds the mean over cells of the latest labelled rows."), make("table", {}, make("tbody", {}, ...parts))] : [];
    const unlike = told.farther < 0.05 ? "unlike every class" : "like rows that there are";
    const notes = told.notes.map((note) => make("p", {}, show(note)));
    get("judged").replaceChildren(list(told.likely), make("p", {}, "It is " + unlike + ": " + percent(told.farther) + " of the rows are farther from every class."), ...notes, ...spoke);
    get("like").replaceChildren(...told.near.map((each) => card(each.row, each.cells, make("p", {}, make("strong", {}, bdi(each.name))))));
  });
  const prepare = () => {
    const fields = get("fields"), single = state.picture !== null && state.used.length === 1;
    if (single) {
      const input = make("input", { type: "file", accept: "image/*", id: "picked" });
      const drop = make("div", { className: "drop" }, make("label", { htmlFor: "picked" }, "A picture: choose it, or drop it here"), input);
      drop.ondragover = (event) => event.preventDefault();
      drop.ondrop = (event) => { event.preventDefault(); input.files = event.dataTransfer.files; get("attempt").requestSubmit(); };
      fields.replaceChildren(drop);
      get("attempt").onsubmit = (event) => { event.preventDefault(); const [file] = input.files; if (file) judge(file, file.type || "image/png"); };
      return;
    }
    const inputs = state.used.map((name) => make(state.texts ? "textarea" : "input", { dir: "auto", name: show(name) }));
    fields.replaceChildren(...inputs.map((input, column) => make("label", {}, bdi(state.used[column]), input)));
    get("attempt").onsubmit = (event) => {
      event.preventDefault();
      judge(JSON.stringify({ rows: [inputs.map((input) => input.value || null)] }), "application/json");
    };
  };

  // What a column is, by a person: the features are made anew, and the model learned anew.
  const SAID = { "": "as it was understood", drop: "no feature (--drop)", group: "rows of one source (--group)" };
  const settle = async (told) => {
    state = told;
    get("title").textContent = show(state.table);
    get("notes").replaceChildren(...state.notes.map((note) => make("li", {}, show(note))));
    const lines = state.columns.map((each) => {
      const options = (each.said === "picture" ? [] : state.choices).map((value) => make("option", { value, selected: value === each.said }, SAID[value] || value));
      const choice = make("select", { "aria-label": "What " + show(each.name) + " is" }, ...options);
      choice.onchange = guarded(async () => {
        choice.disabled = true;
        try { await settle(await post("api/columns", { column: each.name, said: choice.value })); } finally { choice.disabled = false; choice.value = each.said; }
        await start("look");
      });
      const cells = [make("td", {}, show(each.type)), make("td", { className: "number" }, String(each.missing)), ...(options.length ? [make("td", {}, choice)] : state.choices.length ? [make("td")] : [])];
      return make("tr", {}, make("th", { scope: "row" }, bdi(each.name)), ...cells);
    });
    const head = ["column", "taken for", "gaps", ...(state.choices.length ? ["by you"] : [])].map((each) => make("th", { scope: "col" }, each));
    get("columns").replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...lines)));
    for (const id of ["commands", "python"]) get(id).replaceChildren(...state[id].map((each) => make("code", { tabIndex: 0, dir: "ltr" }, show(each))));
    // The page runs the way in which the table's own words do, unless the address says another one.
    const letters = [...state.header, ...names, ...words].join(" ");
    const rightward = (letters.match(/[\u0590-\u08ff\ufb1d-\ufefc]/g) || []).length * 2 > (letters.match(/\p{L}/gu) || []).length;
    document.documentElement.dir = new URLSearchParams(location.search).get("dir") || (rightward ? "rtl" : "ltr");
    prepare();
  };

  const open = (name) => {
    for (const button of document.querySelectorAll("[role=tab]")) {
      const own = button.getAttribute("aria-controls") === name;
      button.setAttribute("aria-selected", String(own));
      button.tabIndex = own ? 0 : -1;
      get(button.getAttribute("aria-controls")).hidden = !own;
    }
    if (name === "label" && question) step("api/next", {});
    if (name === "look" || name === "take") guarded(async () => {
      const told = await api("api/jobs");
      if (name === "look" && !told.fresh && !told.running && told.answered > 1) await start("look");
      else await follow(told);
    })();
  };
  const tabs = [...document.querySelectorAll("[role=tab]")];
  tabs.forEach((button, number) => {
    button.onclick = () => open(button.getAttribute("aria-controls"));
    button.onkeydown = (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key] * (document.documentElement.dir === "rtl" ? -1 : 1);
      if (!by) return;
      const next = tabs[(number + by + tabs.length) % tabs.length];
      next.focus();
      next.click();
    };
  });
  guarded(async () => {
    const [told, first] = await Promise.all([api("api/state"), post("api/next", {})]);
    tell(first);
    words = first.cells || [];
    await settle(told);
    open("label");
    ask(first);
  })();
})();
