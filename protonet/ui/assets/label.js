"use strict";
// The labelling page. The server has all state; the browser tab keeps its identifier and the steps that it can undo.
(() => {
  const parameters = new URLSearchParams(location.search), token = parameters.get("token") || "";
  const MAX_LISTED = 60, MAX_SELECTED = 200, COLOURS = 20, DIGITS = "123456789", KEYS = DIGITS + "0abcdeghijklmopqrtvwxyz"; // without f, n, s, u
  const get = (id) => document.getElementById(id);
  const store = (key, value) => { try { sessionStorage.setItem(key, JSON.stringify(value)); } catch { /* no storage: undo ends at a reload */ } };
  const load = (key, value) => { try { return JSON.parse(sessionStorage.getItem(key)) ?? value; } catch { return value; } };
  const makeTab = () => [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  let tab = load("tab", makeTab()), steps = load("steps", []), state, question, busy = false, names = [], counts = {}, choices = [];
  store("tab", tab);

  // Control characters are shown escaped; text from outside is never parsed as markup.
  const printable = (text) => String(text).replace(/[^\P{C}\n]|[\p{Zl}\p{Zp}]/gu, (char) => "\\u" + char.codePointAt(0).toString(16).padStart(4, "0"));
  const make = (name, properties, ...children) => {
    const element = document.createElement(name);
    Object.entries(properties || {}).forEach(([key, value]) => (key in element ? (element[key] = value) : element.setAttribute(key, value)));
    element.append(...children);
    return element;
  };
  const bdi = (text) => make("bdi", {}, printable(text));
  const percent = (fraction, digits = 0) => (100 * fraction).toFixed(digits) + " %";
  const interval = (ends) => ends.map((end) => (100 * end).toFixed(1)).join(" to ") + " %";
  const tableOf = (head, rows) => {
    const header = head.length ? [make("thead", {}, make("tr", {}, ...head.map((text) => make("th", { scope: "col" }, text))))] : [];
    const lines = rows.map(([first, ...cells]) => make("tr", {}, make("th", { scope: "row" }, first), ...cells.map((cell) => (cell instanceof HTMLTableCellElement ? cell : make("td", { className: "number" }, cell)))));
    return make("table", {}, ...header, make("tbody", {}, ...lines));
  };

  const request = async (path, body, media, tries = 15) => {
    const headers = { Authorization: "Bearer " + token, ...(media ? { "Content-Type": media } : {}) };
    let response;
    try {
      response = await fetch(path, { headers, cache: "no-store", ...(body === undefined ? {} : { method: "POST", body }) });
    } catch {
      throw new Error("The server does not answer. All labels that it confirmed are saved: start the same command again.");
    }
    const value = await response.json();
    if (response.headers.has("retry-after") && tries) { // a model is being fitted, for example
      await new Promise((resolve) => { setTimeout(resolve, 1000); });
      return request(path, body, media, tries - 1);
    }
    if (!response.ok) throw Object.assign(new Error(value.error), { status: response.status });
    return value;
  };
  const post = (path, values) => request(path, JSON.stringify({ tab, by: get("by").value.trim(), second: get("second").checked, ...values }), "application/json");
  const guarded = (work) => async (...values) => {
    try {
      await work(...values);
      get("error").hidden = true;
    } catch (error) {
      get("error").textContent = printable(error.message);
      get("error").hidden = false;
    }
  };
  // Ask a question with one or two answers; the result is the index of the answer, or -1 for none.
  const ask = async (text, ...answers) => {
    const ids = ["use-similar", "use-new"], focused = document.activeElement;
    get("similar-text").replaceChildren(...text);
    ids.forEach((id, index) => {
      get(id).hidden = !answers[index];
      get(id).replaceChildren(...(answers[index] || []));
    });
    get("similar").hidden = false;
    get("similar").scrollIntoView({ block: "nearest" });
    get("use-similar").focus();
    const choice = await new Promise((resolve) => {
      for (const id of [...ids, "use-none"]) get(id).onclick = () => resolve(id);
    });
    get("similar").hidden = true;
    focused.focus();
    return ids.indexOf(choice);
  };
  // Send a label; if its class is new and similar to another one, ask which is meant.
  const send = async (path, values) => {
    const value = await post(path, values);
    if (value.similar === undefined) return value;
    const choice = await ask(["There is a class ", bdi(value.similar), ". Did you mean it?"], ["Use ", bdi(value.similar)], ["Add ", bdi(values.name)]);
    return choice < 0 ? null : post(path, choice ? { ...values, create: true } : { ...values, name: value.similar });
  };

  const baseName = (path) => String(path).split(/[\\/]/).pop();
  const pictureOf = (row) => "picture?row=" + row + "&token=" + encodeURIComponent(token);
  const drawRow = ({ row, cells, picture }, large) => {
    const parts = [];
    if (state.picture !== null) {
      const path = cells[state.picture];
      const unreadable = make("p", { className: "warning" }, picture ? "This picture cannot be read." : "This picture does not exist any more.");
      const image = picture ? make("img", { src: pictureOf(row), alt: "The picture of row " + row }) : unreadable;
      image.onerror = () => image.replaceWith(unreadable);
      parts.push(make("figure", {}, image, make("figcaption", { title: printable(path) }, bdi(baseName(path)))));
    }
    if (large && state.texts) return [...parts, make("p", { className: "text", dir: "auto" }, printable(cells[state.header.indexOf(state.used[0])]))];
    const pairs = state.header.flatMap((name, index) => (index === state.picture ? [] : [make("dt", {}, bdi(name)), make("dd", { dir: "auto" }, printable(cells[index]) || "(missing)")]));
    return pairs.length ? [...parts, make("dl", { className: "cells" }, ...pairs)] : parts;
  };
  const card = (item, ...more) => make("li", {}, ...drawRow(item, false), ...more);
  const labelled = (item) => card(item, make("p", {}, make("strong", {}, bdi(item.name))));

  // Progress, on every view.
  const showProgress = (value) => {
    names = value.classes.map((item) => item.name);
    counts = Object.fromEntries(value.classes.map((item) => [item.name, item.rows]));
    get("progress").textContent = value.answered + " labelled, " + value.left + " left" + (value.flagged ? ", " + value.flagged + " flagged" : "");
    get("missing").hidden = !value.missing.length;
    get("missing").textContent = value.missing.length === 0 ? "" : (value.missing.length === 1 ? "1 picture does" : value.missing.length + " pictures do") + " not exist any more and " + (value.missing.length === 1 ? "is" : "are") + " skipped: " + value.missing.slice(0, 5).map(printable).join(", ") + (value.missing.length > 5 ? " ..." : "");
    get("names").replaceChildren(...names.map((name) => make("option", { value: name })));
    get("counts").replaceChildren(tableOf([], value.classes.map((item) => [bdi(item.name), String(item.rows)])));
    const hides = get("counts").scrollHeight > get("counts").clientHeight;
    get("n-classes").textContent = names.length + (names.length === 1 ? " class" : " classes") + (hides ? "; scroll to see all" : "");
    const next = value.next_check ? "Computed again after " + value.next_check + " more labels." : "Computing ...";
    get("accuracy").textContent = (value.check ? "Accuracy of " + value.checked + " labels: " + percent(value.check.accuracy, 1) + " (95 % interval " + interval(value.check.interval) + "). " : "Accuracy: not known yet. ") + next;
    showExamples();
    for (const id of ["filter-class", "rename-old"]) {
      const before = get(id).value, all = id === "filter-class" ? [make("option", { value: "" }, "all classes")] : [];
      const shown = id === "rename-old" ? names.filter((name) => !state || !state.fixed.includes(name)) : names;
      get(id).replaceChildren(...all, ...shown.map((name) => make("option", { value: name }, printable(name))));
      if ([...get(id).options].some((option) => option.value === before)) get(id).value = before;
    }
  };

  // Label: keys are ignored until the next row is there.
  const showQuestion = (value) => {
    question = value;
    showProgress(value);
    const ended = value.row === null;
    get("reason").textContent = ended ? "" : "Row " + value.row + ": " + printable(value.reason);
    get("question").replaceChildren(...(ended ? [] : drawRow(value, true)));
    const fixed = get("fixed").checked, known = Object.fromEntries((value.likely || []).map((item) => [item.name, item]));
    choices = ended ? [] : fixed ? names.map((name) => known[name] || { name, probability: null }) : value.likely;
    get("keys").replaceChildren(...choices.map((item, index) => {
      const probability = item.probability === null ? [] : [make("span", { className: "unit" }, percent(item.probability))];
      return make("li", {}, make("button", { type: "button", onclick: () => label(item.name) }, make("kbd", {}, KEYS[index] || ""), bdi(item.name), ...probability));
    }));
    get("near").replaceChildren(...(ended ? [] : value.near).map(labelled));
    get("similar-rows").hidden = ended || !value.near.length;
    get("finished").hidden = !ended;
    get("skip").disabled = ended;
    get("flag").disabled = ended || value.second;
    get("add").hidden = ended;
    get("undo").disabled = !steps.length;
    showAll();
  };
  const showAll = () => {
    const text = get("new").value.trim().toLowerCase(), many = names.length > DIGITS.length && question.row !== null && !get("fixed").checked;
    const shown = many ? names.filter((name) => name.toLowerCase().includes(text)) : [];
    get("all").hidden = !many;
    get("all").replaceChildren(...shown.map((name) => make("li", {}, make("button", { type: "button", onclick: () => label(name) }, bdi(name)))));
  };
  get("new").oninput = showAll;
  const step = guarded(async (path, values, after) => {
    if (busy) return;
    busy = true;
    try {
      const value = await send(path, values);
      if (value === null) return;
      if (after) after(value);
      store("steps", steps);
      get("new").value = "";
      showQuestion(value);
    } catch (error) {
      if (path.startsWith("api/undo") && error.status === 409) { // the row was changed elsewhere: the step before can still be undone
        steps.pop();
        store("steps", steps);
        get("undo").disabled = !steps.length;
      }
      throw error;
    } finally { busy = false; }
  });
  const leave = (path, values) => question && question.row !== null && step(path, { row: question.row, ...values }, ((row) => (value) => steps.push({ row, seen: value.label }))(question.row));
  const label = (name) => leave("api/label", { name });
  const undo = () => steps.length && step(steps[steps.length - 1].old === undefined ? "api/undo" : "api/undo_rename", steps[steps.length - 1], () => steps.pop());
  get("skip").onclick = () => leave("api/skip");
  get("flag").onclick = () => leave("api/flag");
  get("undo").onclick = undo;
  get("fixed").onchange = () => { store("fixed", get("fixed").checked); if (question) showQuestion(question); };
  get("add").onsubmit = (event) => {
    event.preventDefault();
    const name = get("new").value;
    get("new").blur();
    label(name);
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !get("similar").hidden) {
      event.preventDefault();
      get("use-none").click();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || get("label").hidden) return;
    if (event.target.matches("input, textarea, select")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (!get("similar").hidden) return;
    const index = event.key.length === 1 ? (get("fixed").checked ? KEYS : DIGITS).indexOf(event.key) : -1;
    const keys = { s: () => get("skip").click(), u: undo, f: () => get("flag").click(), n: () => get("new").focus() };
    if (index >= 0 && choices[index]) label(choices[index].name);
    else if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  addEventListener("pagehide", () => {
    fetch("api/leave", { method: "POST", keepalive: true, headers: { Authorization: "Bearer " + token }, body: JSON.stringify({ tab }) }).catch(() => {});
  });

  // Review: all labels, those that cross-validation predicts as another class first.
  const getRows = async (rows) => (rows.length ? post("api/rows", { rows: rows.slice(0, MAX_LISTED) }) : []);
  const changeable = (item, text, first) => {
    const element = card(item, make("p", {}, ...text));
    let seen = item.name;
    const change = (name) => guarded(async () => {
      const value = await send("api/relabel", { row: item.row, name, seen });
      if (value === null) return;
      seen = value.label;
      showProgress(value);
      element.replaceChildren(make("p", {}, "Row " + item.row + " is now ", bdi(seen), "."), make("button", { type: "button", onclick: change(item.name) }, "Change back to ", bdi(item.name)));
      element.tabIndex = -1;
      element.focus();
    });
    const others = names.length > DIGITS.length ? [] : names.filter((name) => name !== first && name !== item.name);
    const choices = [...(first === null ? [] : [first]), ...others];
    const buttons = choices.map((name, index) => make("button", { type: "button", onclick: change(name) }, make("kbd", {}, index + 1 + " "), bdi(name)));
    const input = make("input", { "aria-label": "Another class for row " + item.row, placeholder: "another class", maxLength: 100, dir: "auto", autocomplete: "off" });
    input.setAttribute("list", "names");
    element.append(make("div", { className: "row" }, ...buttons, make("form", { onsubmit: (event) => { event.preventDefault(); change(input.value)(); } }, input)));
    element.addEventListener("keydown", (event) => {
      const button = event.target === input || event.key.length !== 1 ? undefined : buttons[DIGITS.indexOf(event.key)];
      if (button) button.click();
    });
    return element;
  };
  const describe = (item) => ["labelled ", make("strong", {}, bdi(item.name)), ...(item.by ? [" by ", bdi(item.by)] : []), ...(item.answers || []).flatMap(({ by, name }, index) => [index ? ", " : "; answers: ", bdi(by), " ", bdi(name)]), ...(item.predicted === null ? [] : [", predicted ", item.predicted === item.name ? "the same" : make("strong", { className: "wrongly" }, bdi(item.predicted)), " (" + percent(item.probability) + ")"])];
  const review = guarded(async () => {
    const value = await post("api/labels", { disputed: get("disputed").checked, name: get("filter-class").value || null, text: get("filter-text").value, person: get("filter-by").value === "all" || !get("filter-by").value ? null : get("filter-by").value.slice(1) });
    const chosen = get("filter-by").value;
    get("filter-people").hidden = !value.people.length;
    get("filter-answers").hidden = get("agreement").hidden = !value.agreement.length;
    get("pairs").replaceChildren(tableOf(["people", "rows", "agreement", "kappa"], value.agreement.map(({ people, rows, agreement, kappa }) => [make("span", {}, bdi(people[0]), ", ", bdi(people[1])), String(rows), percent(agreement), kappa === null ? "not defined" : kappa.toFixed(2)])));
    // The values of names have a prefix, as a person may be called "all"; "=" alone is an unknown person.
    get("filter-by").replaceChildren(make("option", { value: "all" }, "everyone"), make("option", { value: "=" }, "unknown"), ...value.people.map((name) => make("option", { value: "=" + name }, printable(name))));
    if ([...get("filter-by").options].some((option) => option.value === chosen)) get("filter-by").value = chosen;
    get("found").textContent = value.total + (value.total === 1 ? " label" : " labels") + (value.differing ? ", " + value.differing + " of them differ from the prediction and come first" : "") + (value.rows.length < value.total ? "; the first " + value.rows.length + " are listed" : "") + ".";
    get("labels").replaceChildren(...value.rows.map((item) => changeable(item, describe(item), item.predicted === item.name ? null : item.predicted)));
  });
  get("filter").onsubmit = (event) => { event.preventDefault(); review(); };
  get("filter-class").onchange = get("filter-by").onchange = get("disputed").onchange = get("filter-text").oninput = review;
  get("rename").onsubmit = guarded(async (event) => {
    event.preventDefault();
    const old = get("rename-old").value, name = get("rename-new").value.trim(), merged = names.includes(name);
    const many = (each) => [bdi(each), " (" + counts[each] + (counts[each] === 1 ? " label" : " labels") + ")"];
    if (merged && name !== old && (await ask(["Merge ", ...many(old), " into ", ...many(name), "? All of them become ", bdi(name), "."], ["Merge into ", bdi(name)])) < 0) return;
    const value = await send("api/rename", { old, name });
    if (value === null) return;
    steps.push({ old, name });
    store("steps", steps);
    get("undo").disabled = get("undo-rename").hidden = false;
    showProgress(value);
    get("renamed").replaceChildren(bdi(old), merged ? " was merged with " : " was renamed to ", bdi(name), ".");
    get("rename-new").value = "";
    await review();
  });

  get("undo-rename").onclick = guarded(async () => {
    const last = steps.map((item) => item.old !== undefined).lastIndexOf(true), { old, name } = steps[last];
    showProgress(await post("api/undo_rename", { old, name }));
    steps.splice(last, 1);
    store("steps", steps);
    get("renamed").replaceChildren(bdi(old), " is a class again.");
    get("undo-rename").hidden = !steps.some((item) => item.old !== undefined);
    await review();
  });

  // New rows: texts, pictures, the camera.
  const MAX_PICTURE = 32 * 2 ** 20;
  const finishAdding = async (text) => {
    get("added").textContent = text;
    const value = await post("api/next", {});
    if (question && question.row === null) showQuestion(value); else showProgress(value);
  };
  const said = (n, what) => n + " " + what + (n === 1 ? " was" : "s were") + " added. ";
  get("add-texts").onsubmit = guarded(async (event) => {
    event.preventDefault();
    const lines = get("texts").value.split("\n").filter((line) => line.trim()).length, { added } = await post("api/add", { text: get("texts").value });
    get("texts").value = "";
    await finishAdding(said(added, "row") + (added < lines ? lines - added + " of the lines were there already." : ""));
  });
  const addPicture = (file, name) => {
    if (file.size > MAX_PICTURE) throw new Error("it has more than 32 MB");
    return request("api/add_picture?name=" + encodeURIComponent(name.slice(-100)), file, file.type || "application/octet-stream");
  };
  const addPictures = guarded(async (files) => {
    let n = 0;
    const refused = [];
    for (const file of files) {
      get("added").textContent = "Adding " + printable(file.name) + " ...";
      try {
        n += (await addPicture(file, file.name)).added;
      } catch (error) { refused.push(file.name + " (" + error.message + ")"); }
    }
    get("pictures").value = "";
    await finishAdding(said(n, "picture") + (n + refused.length < files.length ? "Others were there already. " : "") + (refused.length ? "Not added: " + refused.map(printable).join(", ") : ""));
  });
  const prepareAdding = () => {
    const pictures = state.adds === "pictures";
    get("adding").hidden = !state.adds;
    get("add-pictures").hidden = !pictures;
    get("add-texts").hidden = pictures;
    get("added-file").textContent = printable(state.added);
    get("to-examples").hidden = !pictures;
    get("pictures").onchange = () => addPictures([...get("pictures").files]);
  };
  document.addEventListener("dragover", (event) => { if (state && state.adds === "pictures") event.preventDefault(); });
  document.addEventListener("drop", (event) => {
    if (!state || state.adds !== "pictures" || event.target.closest("#try")) return;
    event.preventDefault();
    get("adding").open = true;
    addPictures([...event.dataTransfer.files]);
  });
  // Cameras: each has a button that turns it on and off, and a video. Another tab turns them off.
  const grab = (video) => {
    const canvas = make("canvas", { width: video.videoWidth, height: video.videoHeight });
    canvas.getContext("2d").drawImage(video, 0, 0);
    return new Promise((resolve) => { canvas.toBlob(resolve, "image/jpeg", 0.95); });
  };
  const turnOff = [];
  const connect = (button, video, onChange) => {
    button.hidden = !navigator.mediaDevices; // which is there on localhost and over https only
    const show = (on) => {
      video.hidden = !on;
      button.textContent = on ? "Turn the camera off" : "Use the camera";
      onChange(on);
    };
    const stop = () => {
      if (!video.srcObject) return;
      video.srcObject.getTracks().forEach((track) => track.stop());
      video.srcObject = null;
      show(false);
    };
    turnOff.push(stop);
    button.onclick = guarded(async () => {
      if (video.srcObject) { stop(); return; }
      const stream = await navigator.mediaDevices.getUserMedia({ video: true }).catch((error) => { throw new Error("The camera cannot be used: " + error.message); });
      video.srcObject = stream;
      video.hidden = false; // a hidden video does not play
      await video.play();
      show(true);
    });
  };
  connect(get("camera"), get("video"), (on) => { get("take").hidden = !on; });
  get("take").onclick = guarded(async () => addPictures([new File([await grab(get("video"))], "camera.jpg", { type: "image/jpeg" })]));

  // Examples: classes first, then pictures of each.
  const MAX_RECENT = 8, FRAME_MILLISECONDS = 150, cards = new Map();
  const addExample = async (name, picture, file) => {
    const { row } = await addPicture(picture, file);
    if (row === null) return; // the picture is there already
    showProgress(await post("api/label", { row, name, create: true }));
    const { last } = cards.get(name);
    last.prepend(make("img", { src: pictureOf(row), alt: "Row " + row }));
    if (last.children.length > MAX_RECENT) last.lastElementChild.remove();
  };
  const makeExampleCard = (name) => {
    const count = make("span", { className: "soft" }), last = make("div", { className: "last" });
    const hold = make("button", { type: "button", className: "hold", disabled: !get("record-video").srcObject }, "Hold to record");
    const file = make("input", { type: "file", accept: "image/*", multiple: true, "aria-label": "Pictures of " + printable(name) });
    let held = false, recording = false;
    const end = () => { held = false; hold.classList.remove("recording"); };
    const record = guarded(async () => { // one picture after the other, as fast as the server takes them
      held = true;
      hold.classList.add("recording");
      if (recording) return;
      recording = true;
      try {
        do {
          await addExample(name, await grab(get("record-video")), "camera.jpg");
          await new Promise((resolve) => { setTimeout(resolve, FRAME_MILLISECONDS); });
        } while (held && get("record-video").srcObject);
      } finally { recording = false; end(); }
    });
    hold.onpointerdown = (event) => { hold.setPointerCapture(event.pointerId); record(); };
    hold.onpointerup = hold.onpointercancel = hold.onblur = hold.onkeyup = end;
    hold.onkeydown = (event) => { if ([" ", "Enter"].includes(event.key) && !event.repeat) record(); };
    hold.oncontextmenu = (event) => event.preventDefault(); // of a long touch
    file.onchange = guarded(async () => {
      const files = [...file.files];
      file.value = "";
      for (const [index, each] of files.entries()) {
        get("recorded").textContent = "Adding " + (index + 1) + " of " + files.length + " pictures ...";
        await addExample(name, each, each.name);
      }
      get("recorded").textContent = "";
    });
    const item = make("li", {}, make("p", {}, make("strong", {}, bdi(name)), " ", count), make("div", { className: "row" }, hold, file), last);
    return { item, count, hold, last };
  };
  // Cards stay where they are, as one of their buttons may be held.
  function showExamples() {
    for (const name of cards.keys()) {
      if (!names.includes(name)) { cards.get(name).item.remove(); cards.delete(name); }
    }
    for (const name of names) {
      if (!cards.has(name)) {
        cards.set(name, makeExampleCard(name));
        get("example-classes").append(cards.get(name).item);
      }
      cards.get(name).count.textContent = counts[name] + (counts[name] === 1 ? " example" : " examples");
    }
  }
  connect(get("record-camera"), get("record-video"), (on) => cards.forEach(({ hold }) => { hold.disabled = !on; }));
  get("add-class").onsubmit = guarded(async (event) => {
    event.preventDefault();
    const value = await send("api/add_class", { name: get("class-name").value });
    if (value === null) return;
    get("class-name").value = "";
    showProgress(value);
  });

  // Results.
  const tile = (name, value, more) => make("div", {}, make("dt", {}, name), make("dd", {}, value), make("dd", { className: "more" }, more));
  const showMetrics = async (value) => {
    const { accuracy, confusion, rows_of_table: indices, data } = value.metrics;
    if (accuracy === undefined || accuracy === null) {
      get("tiles").replaceChildren(tile("accuracy", "not known yet", "two classes need two labels each"));
      return;
    }
    const classes = value.metrics.classes.map((item) => String(item.name));
    get("tiles").replaceChildren(tile("accuracy", percent(accuracy, 1), "95 % interval: " + interval(value.metrics.interval)), tile("balanced accuracy", percent(value.metrics.balanced_accuracy, 1), "the mean over classes"), tile("labels", data.rows, value.fresh ? "all of them" : "some labels have changed since"));
    const rows = value.metrics.rows || { index: [], label: [], predicted: [], probability: [] };
    const max = Math.max(1, ...confusion.flat());
    const lines = confusion.map((line, given) => make("tr", {}, make("th", { scope: "row" }, bdi(classes[given])), ...line.map((count, predicted) => {
      if (!count) return make("td");
      const list = guarded(async () => {
        const cell = rows.index.map((_, index) => index).filter((index) => rows.label[index] === given && rows.predicted[index] === predicted);
        const items = await getRows(cell.map((index) => indices[rows.index[index]]));
        get("behind").replaceChildren(...items.map((item, index) => {
          const full = { ...item, name: classes[given], predicted: classes[predicted], probability: rows.probability[cell[index]] };
          return changeable(full, describe(full), given === predicted ? null : classes[predicted]);
        }));
      });
      return make("td", {}, make("button", { type: "button", className: "h" + Math.ceil((5 * count) / max), onclick: list, "aria-label": count + " rows of " + classes[given] + " predicted as " + classes[predicted] }, String(count)));
    })));
    const head = make("tr", {}, make("th", {}, "label ↓ prediction →"), ...classes.map((name) => make("th", { scope: "col" }, make("span", {}, bdi(name)))));
    get("matrix").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...lines)));
    get("behind").replaceChildren();
    const issues = (value.metrics.suspects || []).filter((item) => item.score > 0);
    const items = await getRows(issues.map((item) => indices[item.index]));
    get("suspects").replaceChildren(...items.map((item, index) => {
      const full = { ...item, name: classes[issues[index].label], predicted: classes[issues[index].suggested], probability: issues[index].suggested_probability };
      return changeable(full, describe(full), full.predicted);
    }));
    if (!items.length) get("suspects").append(make("li", {}, "No label issues found."));
  };
  const FILES = { model: "the model", report: "its report", predictions: "predictions for all rows", labelled: "the labelled table" };
  const follow = async (value) => {
    get("computing").textContent = value.running === "results" ? "Computing metrics ..." : "";
    get("making").textContent = value.running ? (value.running === "export" ? "Making the model ..." : "Computing metrics ...") : "";
    get("compute").disabled = get("make").disabled = value.running !== "";
    showProgress(value);
    if (value.running) {
      setTimeout(guarded(async () => follow(await request("api/jobs"))), 400);
      return;
    }
    if (value.metrics) await showMetrics(value);
    get("files").replaceChildren(...[...value.ready, "labelled"].map((name) => make("li", {}, make("a", { href: "download?file=" + name + "&token=" + encodeURIComponent(token), download: "" }, FILES[name]))));
    if (value.error) throw new Error(value.error);
    // Labels that were given during the job.
    if (!value.fresh && value.answered > 1 && !get("results").hidden) await start("results");
  };
  const start = guarded(async (job) => follow(await post("api/jobs", { job })));
  get("compute").onclick = () => start("results");
  get("make").onclick = () => start("export");

  // The map is a canvas, as there may be a hundred thousand rows.
  let points, order, current = -1, only = -1, selected = [], outline = null;
  const place = (index) => [20 + 420 * (points.x[index] + 1), 20 + 280 * (1 - points.y[index])];
  const paint = () => {
    const canvas = get("map"), pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const colours = Array.from({ length: COLOURS }, (_, index) => style.getPropertyValue("--c" + index));
    const accent = style.getPropertyValue("--accent"), ink = style.getPropertyValue("--ink");
    const size = points.x.length > 5000 ? 2 : 5, chosen = new Set(selected);
    const frame = (x, y, width, colour) => { pen.strokeStyle = colour; pen.globalAlpha = 1; pen.strokeRect(x - width / 2, y - width / 2, width, width); };
    pen.clearRect(0, 0, canvas.width, canvas.height);
    points.x.forEach((_, index) => {
      const [x, y] = place(index);
      pen.globalAlpha = only >= 0 && points.predicted[index] !== only ? 0.06 : 0.75;
      pen.fillStyle = colours[points.predicted[index] % COLOURS];
      if (points.predicted[index] % COLOURS < 10) pen.fillRect(x - size / 2, y - size / 2, size, size);
      else { pen.beginPath(); pen.arc(x, y, size / 2 + 1, 0, 7); pen.fill(); }
      if (chosen.has(points.row[index])) frame(x, y, 12, accent);
      if (points.label[index] >= 0) frame(x, y, 8, ink);
    });
    if (current >= 0) { pen.lineWidth = 3; frame(...place(current), 16, accent); pen.lineWidth = 1; }
    pen.globalAlpha = 1;
  };
  matchMedia("(prefers-color-scheme: dark)").onchange = () => points && paint();
  const showPoint = guarded(async (index) => {
    current = index;
    paint();
    const [item] = await getRows([points.row[index]]), given = points.label[index];
    get("point").hidden = false;
    get("point").replaceChildren(...drawRow(item, false), make("p", {}, "Row " + item.row + ": predicted ", bdi(points.names[points.predicted[index]]), ", ", ...(given < 0 ? ["not labelled"] : ["labelled ", bdi(points.names[given])])));
  });
  get("draw").onclick = guarded(async () => {
    points = await request("api/map");
    order = points.x.map((_, index) => index).sort((a, b) => points.x[a] - points.x[b]);
    current = only = -1;
    selected = [];
    get("selection").hidden = get("point").hidden = true;
    get("lasso").hidden = get("map").hidden = false;
    get("legend").replaceChildren(...points.names.map((name, number) => {
      const dot = make("i", { className: number % COLOURS < 10 ? "" : "round" });
      dot.style.background = "var(--c" + (number % COLOURS) + ")";
      const button = make("button", { type: "button", "aria-pressed": "false" }, dot, bdi(name));
      button.onclick = () => {
        only = only === number ? -1 : number;
        get("legend").querySelectorAll("button").forEach((other, index) => other.setAttribute("aria-pressed", String(index === only)));
        paint();
      };
      return make("li", {}, button);
    }));
    paint();
  });
  get("map").onkeydown = (event) => {
    if (event.key === " " && points && current >= 0) {
      event.preventDefault();
      const row = points.row[current];
      select(selected.includes(row) ? selected.filter((other) => other !== row) : [...selected, row]);
      return;
    }
    const by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    if (!by || !points) return;
    event.preventDefault();
    showPoint(order[(order.indexOf(current) + by + order.length) % order.length]);
  };
  const showSelection = guarded(async () => {
    const items = await getRows(selected), rows = selected.slice(0, MAX_SELECTED);
    get("selection").hidden = !selected.length;
    get("selected").textContent = (selected.length === 1 ? "1 row is selected" : selected.length + " rows are selected") + (selected.length > MAX_SELECTED ? "; a button changes the first " + MAX_SELECTED : "") + ". Labelled rows keep their label.";
    const apply = (name) => guarded(async () => {
      const value = await send("api/label_many", { rows, name });
      if (value === null) return;
      showQuestion(value);
      for (const row of rows) {
        const index = points.row.indexOf(row);
        if (name !== null && points.label[index] < 0) points.label[index] = points.names.indexOf(name);
      }
      selected = [];
      paint();
      await showSelection();
      get("point").hidden = false;
      get("point").textContent = rows.length + " rows: " + (name === null ? "flagged" : printable(name));
      get("map").focus();
    });
    const input = make("input", { id: "other", maxLength: 100, dir: "auto", autocomplete: "off" });
    const form = make("form", { onsubmit: (event) => { event.preventDefault(); apply(input.value)(); } }, make("label", { htmlFor: "other" }, "Another class "), input, " ", make("button", {}, "Add class"));
    get("actions").replaceChildren(...names.map((name) => make("button", { type: "button", onclick: apply(name) }, bdi(name))), form, make("button", { type: "button", onclick: apply(null) }, "Flag"));
    get("inside").replaceChildren(...items.map((item) => card(item)));
  });
  const select = (rows) => { selected = rows; paint(); return showSelection(); };
  const contains = (polygon, x, y) => polygon.reduce((inside, [ax, ay], index) => {
    const [bx, by] = polygon[(index + polygon.length - 1) % polygon.length];
    return ay > y !== by > y && x < ax + ((bx - ax) * (y - ay)) / (by - ay) ? !inside : inside;
  }, false);
  const position = (event) => {
    const box = get("map").getBoundingClientRect(), scale = get("map").width / box.width;
    return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
  };
  const lassoIsOn = () => get("lasso").getAttribute("aria-pressed") === "true";
  get("lasso").onclick = () => {
    get("map").style.touchAction = lassoIsOn() ? "" : "none";
    get("lasso").setAttribute("aria-pressed", String(!lassoIsOn()));
  };
  get("map").onpointerdown = (event) => {
    if (!points || !event.isPrimary || (event.pointerType === "touch" && !lassoIsOn())) return;
    outline = [position(event)];
    get("map").setPointerCapture(event.pointerId);
  };
  get("map").onpointermove = (event) => {
    if (!outline) return;
    outline.push(position(event));
    const pen = get("map").getContext("2d"), [from, to] = outline.slice(-2);
    pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent");
    pen.beginPath();
    pen.moveTo(...from);
    pen.lineTo(...to);
    pen.stroke();
  };
  get("map").onpointercancel = () => { outline = null; };
  get("map").onpointerup = (event) => {
    if (!outline) return;
    const line = outline, [[x, y]] = line, distance = (index) => Math.hypot(...place(index).map((value, axis) => value - [x, y][axis]));
    outline = null;
    if (Math.max(...line.map(([px, py]) => Math.hypot(px - x, py - y))) < 8) showPoint(order.reduce((best, index) => (distance(index) < distance(best) ? index : best)));
    else select(points.row.filter((_, index) => (only < 0 || points.predicted[index] === only) && contains(line, ...place(index))));
  };

  // Try.
  const classify = async (body, media, live) => {
    const value = await request("api/try", body, media);
    const support = value.support.map((item) => [bdi(item.name), (item.support > 0 ? "+" : "") + item.support.toFixed(2)]);
    const explanation = support.length ? [make("h2", {}, "Support of each column"), make("p", { className: "soft" }, "By how much the log-probability of the predicted class exceeds its mean over cells of the latest labelled rows."), tableOf([], support)] : [];
    const distance = (value.farther < 0.05 ? "It is unlike every class: " : "It is as similar to a class as other rows: ") + percent(value.farther) + " of the rows are farther from every class.";
    get("prediction").replaceChildren(tableOf([], value.likely.map((item) => [bdi(item.name), percent(item.probability, 1)])), make("p", {}, distance), ...value.notes.map((note) => make("p", {}, printable(note))), ...explanation);
    if (!live) get("like").replaceChildren(...value.near.map(labelled));
  };
  const prepareTry = () => {
    const takesPicture = state.picture !== null && state.used.length === 1;
    get("try-camera").hidden = !takesPicture || !navigator.mediaDevices;
    if (takesPicture) {
      const input = make("input", { type: "file", accept: "image/*", id: "file" });
      const drop = make("div", { className: "drop" }, make("label", { htmlFor: "file" }, "A picture: choose it, or drop it here"), input);
      const show = guarded(() => {
        const [file] = input.files;
        if (!file) return;
        get("preview").replaceChildren(make("img", { src: URL.createObjectURL(file), alt: "The chosen picture " + printable(file.name) }));
        return classify(file, file.type || "image/png");
      });
      drop.ondragover = (event) => event.preventDefault();
      drop.ondrop = (event) => { event.preventDefault(); input.files = event.dataTransfer.files; show(); };
      input.onchange = show;
      get("fields").replaceChildren(drop);
      get("attempt").onsubmit = (event) => { event.preventDefault(); show(); };
      return;
    }
    const inputs = state.used.map((name) => make(state.texts ? "textarea" : "input", { dir: "auto", name: printable(name) }));
    get("fields").replaceChildren(...inputs.map((input, column) => make("label", {}, bdi(state.used[column]), input)));
    get("attempt").onsubmit = guarded((event) => {
      event.preventDefault();
      return classify(JSON.stringify({ rows: [inputs.map((input) => input.value || null)] }), "application/json");
    });
  };
  // The live camera: a picture is classified as soon as the one before is.
  const classifyLive = guarded(async () => {
    get("preview").replaceChildren();
    get("like").replaceChildren();
    while (get("try-video").srcObject) {
      await classify(await grab(get("try-video")), "image/jpeg", true);
      await new Promise((resolve) => { setTimeout(resolve, FRAME_MILLISECONDS); });
    }
  });
  connect(get("try-camera"), get("try-video"), (on) => {
    get("prediction").setAttribute("aria-live", on ? "off" : "polite"); // it changes several times a second
    if (on) classifyLive();
  });

  // What does not depend on labels: columns, notes, commands.
  const copyable = (text) => {
    const code = make("code", { tabIndex: 0, dir: "ltr" }, printable(text)), button = make("button", { type: "button" }, "Copy");
    button.onclick = async () => {
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
    };
    return make("div", { className: "command" }, code, button);
  };
  const CHOICES = { "": "as inferred", drop: "not a feature (--drop)", group: "groups of rows (--group)" };
  const showState = (value) => {
    state = value;
    get("title").textContent = printable(baseName(state.table));
    get("output").textContent = printable(state.output);
    get("guidelines").hidden = !state.guidelines;
    get("guidelines").open = load("guidelines", true);
    get("guidelines").lastElementChild.textContent = printable(state.guidelines);
    get("notes").replaceChildren(...state.notes.map((note) => make("li", {}, printable(note))));
    const rows = state.columns.map((column) => {
      const options = (column.choice === "picture" ? [] : state.choices).map((option) => make("option", { value: option, selected: option === column.choice }, CHOICES[option] || option));
      const choice = make("select", { "aria-label": "Type of " + printable(column.name) }, ...options);
      choice.onchange = guarded(async () => {
        choice.disabled = true;
        try { showState(await post("api/columns", { column: column.name, choice: choice.value })); } finally { choice.disabled = false; choice.value = column.choice; }
        await start("results");
      });
      return [bdi(column.name), make("td", {}, printable(column.type)), String(column.missing), ...(options.length ? [make("td", {}, choice)] : state.choices.length ? [make("td")] : [])];
    });
    get("columns").replaceChildren(tableOf(["column", "type", "missing values", ...(state.choices.length ? ["your choice"] : [])], rows));
    get("commands").replaceChildren(...state.commands.map(copyable));
    get("python").replaceChildren(copyable(get(state.picture === null ? "use-table" : "use-pictures").content.textContent));
    prepareAdding();
    prepareTry();
  };

  const VIEWS = {
    label: () => question && step("api/next", {}),
    review,
    results: guarded(async () => {
      const value = await request("api/jobs");
      if (!value.fresh && !value.running && value.answered > 1) await start("results");
      else await follow(value);
    }),
    export: guarded(async () => follow(await request("api/jobs"))),
  };
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const open = (name) => {
    for (const button of tabs) {
      const chosen = button.getAttribute("aria-controls") === name;
      button.setAttribute("aria-selected", String(chosen));
      button.tabIndex = chosen ? 0 : -1;
      get(button.getAttribute("aria-controls")).hidden = !chosen;
    }
    turnOff.forEach((stop) => stop());
    if (VIEWS[name]) VIEWS[name]();
  };
  tabs.forEach((button) => {
    button.onclick = () => open(button.getAttribute("aria-controls"));
    button.onkeydown = (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key] * (document.documentElement.dir === "rtl" ? -1 : 1);
      if (!by) return;
      const shown = tabs.filter((each) => !each.hidden), next = shown[(shown.indexOf(button) + by + shown.length) % shown.length];
      next.focus();
      next.click();
    };
  });
  document.querySelectorAll("[data-help]").forEach((place, number) => {
    const topic = place.parentElement.textContent.trim().split(/[.:(]/)[0] || "these buttons", id = "help-" + number;
    const note = make("span", { id, className: "note", role: "note", hidden: true }, place.dataset.help);
    const button = make("button", { type: "button", className: "help", "aria-label": "Help: " + topic, "aria-expanded": "false", "aria-controls": id }, "?");
    button.onclick = () => { note.hidden = !note.hidden; button.setAttribute("aria-expanded", String(!note.hidden)); };
    place.append(button);
    if (place.parentElement.matches("h2")) place.parentElement.after(note); else place.append(note);
  });
  get("fixed").checked = load("fixed", false);
  get("guidelines").ontoggle = () => store("guidelines", get("guidelines").open);
  get("by").value = load("by", "");
  get("second").checked = load("second", false);
  const askAgain = guarded(async () => {
    await post("api/leave", {});
    await step("api/next", {});
  });
  get("by").onchange = () => { store("by", get("by").value); if (get("second").checked) askAgain(); };
  get("second").onchange = () => { store("second", get("second").checked); askAgain(); };
  // A duplicated tab has the identifier and the steps of the first one: it takes a new identifier, and no steps.
  const channel = new BroadcastChannel("protonet");
  channel.onmessage = ({ data }) => {
    if (data.hello === tab) channel.postMessage({ taken: tab });
    if (data.taken !== tab) return;
    tab = makeTab();
    steps = [];
    store("tab", tab);
    store("steps", steps);
    if (question) step("api/next", {});
  };
  channel.postMessage({ hello: tab });
  document.querySelectorAll("[data-open]").forEach((button) => { button.onclick = () => get("to-" + button.dataset.open).click(); });
  guarded(async () => {
    const [value, first] = await Promise.all([request("api/state"), post("api/next", {})]);
    showState(value);
    open(first.row === null && !first.answered && state.adds === "pictures" ? "examples" : "label");
    showQuestion(first);
    // The page runs in the direction of the table's own words, unless the address has another one.
    const letters = [...state.header, ...names, ...(first.cells || [])].join(" ");
    const rightward = (letters.match(/[\u0590-\u08ff\ufb1d-\ufefc]/g) || []).length * 2 > (letters.match(/\p{L}/gu) || []).length;
    document.documentElement.dir = parameters.get("dir") || (rightward ? "rtl" : "ltr");
  })();
})();
