/* The Lipschitz explorer: controls, presets, permalink. Numbers come from lipschitz.js, drawings from explorer-view.js
   and, for the certified family, explorer-potential.js. */
(() => {
  "use strict";

  const { compute, potential, DEFAULTS, view, potentialView } = window.lipExplorer;
  const FIELDS = [
    { name: "a", symbol: "a", text: "slope of the activation", min: 0.01, max: 1, step: 0.01 },
    { name: "c", symbol: "c", text: "norm of the convolutions", min: 0.1, max: 4, step: 0.05 },
    { name: "gamma", symbol: "γ̄", text: "gain of the norms", min: 0.1, max: 2, step: 0.05 },
    { name: "alpha1", symbol: "α₁", text: "mix in the residual block", min: 0.01, max: 0.99, step: 0.01 },
    { name: "alpha2", symbol: "α₂", text: "mix in the fusion", min: 0.01, max: 0.99, step: 0.01 },
    { name: "n", symbol: "n", text: "number of resolutions", min: 1, max: 8, step: 1 },
    { name: "p", symbol: "p", text: "dropout rate", min: 0, max: 0.9, step: 0.01 },
  ];
  const BLOCKS = { paper: "the paper's", potential: "the certified family" };
  const TOLERANCES = [1e-1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8];
  const UNDO = {
    none: "nothing (Lipschitz MDEQ)",
    S1: "S1: γ not clipped",
    S2: "S2: GN for MGN, ε = 1e-5",
    S3: "S3: convs not constrained",
    S4: "S4: no softmax, mean (as run)",
    "S4-sum": "S4: no softmax, sum (text)",
    S5: "S5: no α₁",
    S6: "S6: no α₂ (text)",
    "S6-sum": "S6: no α₂, no softmax (as run)",
    S7: "S7: no α₁, no α₂ (text)",
    "S7-sum": "S7: no α₁, no α₂, no softmax (as run)",
    MDEQ: "all of them (MDEQ)",
  };

  /* Every row of the paper's tables; `paper` is the L that the paper states for it. */
  const row = (group, label, values, paper = null) => ({ group, label, values, paper });
  const tables = ["Table 1: CIFAR-10", "Table 2: ablation", "Table 3: ImageNet (p = 0)"];
  const PRESETS = [
    row(tables[0], "MDEQ (also with JR, PG, JFB)", { undo: "MDEQ" }),
    row(tables[0], "Lipschitz MDEQ, L = 14.43", { a: 1 }, 14.43),
    row(tables[0], "Lipschitz MDEQ, L = 1.0", {}, 1.0),
    row(tables[0], "Lipschitz MDEQ, L = 0.03", { a: 0.1 }, 0.03),
    row(tables[0], "L = 14.43 + JFB", { a: 1 }, 14.43),
    row(tables[0], "L = 1.0 + JFB", {}, 1.0),
    row(tables[0], "L = 0.03 + JFB", { a: 0.1 }, 0.03),
    row(tables[1], "MDEQ", { undo: "MDEQ" }),
    row(tables[1], "Lipschitz MDEQ, L = 1.0", {}, 1.0),
    ...Object.keys(UNDO)
      .filter((undo) => undo.startsWith("S"))
      .map((undo) => row(tables[1], UNDO[undo], { undo })),
    row(tables[2], "MDEQ", { p: 0, undo: "MDEQ" }),
    row(tables[2], "Lipschitz MDEQ, L = 0.794", { p: 0 }, 0.794),
    row(tables[2], "Lipschitz MDEQ, L = 0.026", { a: 0.1, p: 0 }, 0.026),
    row(tables[2], "L = 0.794 − Conv*", { p: 0, undo: "S3" }),
    row(tables[2], "L = 0.026 − Conv*", { a: 0.1, p: 0, undo: "S3" }),
    row("Text and figures", "Section 3: example, a = 0.35", { a: 0.35 }, 0.86),
    row("Text and figures", "Figure 2: fixed setting, c = 1.5", { c: 1.5 }),
    ...[0.2, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9].map((a) => row("Text and figures", `Figure 4: a = ${a}`, { a })),
  ];
  Object.assign(window.lipExplorer, { FIELDS, PRESETS });
  if (!view) return;

  const { el, addSlider, readLink, writeLink } = window.lipPage;
  const { app, part } = view;
  const START = { ...DEFAULTS, x: "a", y: "linear", mode: "train" };
  let state = { ...START };
  let paperL = null;
  const fieldOf = (name) => FIELDS.find((field) => field.name === name);
  const certified = () => state.block === "potential";

  // ---- what a reader does

  function set(change) {
    state = { ...state, ...change };
    if (Object.keys(change).some((key) => !["x", "y", "mode", "tol", "block", "tau"].includes(key))) {
      paperL = null;
      part("preset").value = "";
    }
    render();
    announce();
  }

  function addSelect(name, options, change) {
    for (const [value, text] of options) part(name).append(el("option", { value }, text));
    part(name).addEventListener("change", () => set(change(part(name).value)));
  }

  function addPresets() {
    const select = part("preset");
    const groups = new Map();
    PRESETS.forEach(({ group, label }, index) => {
      if (!groups.has(group)) groups.set(group, select.appendChild(el("optgroup", { label: group })));
      groups.get(group).append(el("option", { value: index }, label));
    });
    select.addEventListener("change", () => {
      const preset = PRESETS[select.value];
      if (!preset) return;
      const { tol, x, y, mode } = state;
      state = { ...START, tol, x, y, mode, ...preset.values };
      paperL = preset.paper;
      render();
      announce();
    });
  }

  function addButtons() {
    part("reset").addEventListener("click", () => {
      set(START);
      say("All values are back at the start.");
    });
    part("link").addEventListener("click", async () => {
      link();
      try {
        await navigator.clipboard.writeText(location.href);
        say("Link copied.");
      } catch {
        say("Copy the link from the address bar.");
      }
    });
    part("plot").addEventListener("click", (event) => set({ [state.x]: valueAt(event.clientX) }));
    part("tau-plot").addEventListener("click", (event) => set({ tau: tauAt(event.clientX) }));
    part("log").addEventListener("change", () => set({ y: part("log").checked ? "log" : "linear" }));
    part("post").addEventListener("change", () => set({ post_affine: part("post").checked }));
    for (const radio of app.querySelectorAll("input[name=lip-mode]"))
      radio.addEventListener("change", () => set({ mode: radio.value }));
  }

  // ---- the address: #a=0.4&c=2&…, or #block=potential&tau=0.9

  function link() {
    const own = (key) => (certified() ? key === "tau" : Boolean(fieldOf(key)));
    const matters = (key) => (certified() ? ["block", "tol"].includes(key) : key !== "tau");
    writeLink(
      state,
      Object.keys(START).filter((key) => own(key) || (matters(key) && state[key] !== START[key])),
    );
  }

  /** Takes from the address what is valid; the rest starts at its default. False if it holds no setting. */
  function follow() {
    const found = readLink([...FIELDS, potentialView.TAU]);
    if (!found) return false;
    const choices = {
      block: Object.keys(BLOCKS),
      undo: Object.keys(UNDO),
      x: FIELDS.map(({ name }) => name),
      y: ["linear", "log"],
      mode: ["train", "test"],
    };
    state = { ...START };
    const taken = (key, value) =>
      key === "tau" || fieldOf(key) || (Object.hasOwn(choices, key) && choices[key].includes(value));
    for (const [key, value] of Object.entries(found)) if (taken(key, value)) state[key] = value;
    if (TOLERANCES.includes(Number(found.tol))) state.tol = Number(found.tol);
    if (found.post_affine === "false") state.post_affine = false;
    return true;
  }

  // ---- what a reader sees

  let timer = 0;
  function say(text) {
    clearTimeout(timer);
    part("live").textContent = text;
  }
  /** Tells a screen reader the result, once the slider rests. */
  function announce() {
    clearTimeout(timer);
    const told = () =>
      certified() ? potentialView.summary(potential(state), state) : view.summary(compute(state), state);
    timer = setTimeout(() => say(told()), 600);
  }

  let sliders = [];
  let showTau = () => {};
  function renderControls() {
    for (const node of app.querySelectorAll("[data-block]")) node.hidden = node.dataset.block !== state.block;
    part("cards").classList.toggle("lip-three", certified());
    part("cards").setAttribute("aria-label", certified() ? "L and what it guarantees" : "L in four readings");
    FIELDS.forEach((f, i) => sliders[i](state[f.name]));
    showTau(state.tau);
    for (const name of ["block", "tol", "undo", "x"]) part(name).value = state[name];
    part("post").checked = state.post_affine;
    part("log").checked = state.y === "log";
    for (const radio of app.querySelectorAll("input[name=lip-mode]")) radio.checked = radio.value === state.mode;
  }

  let frame = 0;
  let valueAt = () => state[state.x];
  let tauAt = () => state.tau;
  /** The slower part, at most once per frame. */
  function drawLater() {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(() => {
      if (certified()) {
        tauAt = potentialView.plot(state);
        return;
      }
      valueAt = view.plot(state, fieldOf(state.x), paperL);
      view.ranges(state, fieldOf(state.x));
    });
  }

  function render(linked = true) {
    renderControls();
    if (certified()) renderCertified();
    else renderPaper();
    if (linked) link();
    drawLater();
  }

  function renderPaper() {
    const r = compute(state);
    view.cards(r, state);
    view.readings(r, state, paperL);
    view.factors(r, state);
    view.matrix(r);
    view.python(state, FIELDS);
  }

  function renderCertified() {
    potentialView.cards(potential(state), state);
    potentialView.table(state, TOLERANCES);
    potentialView.python(state);
  }

  sliders = FIELDS.map((f) =>
    addSlider(part("sliders"), { ...f, label: view.axis(f) }, (value) => set({ [f.name]: value }), say),
  );
  const TAU = potentialView.TAU;
  showTau = addSlider(part("tau"), { ...TAU, label: view.axis(TAU) }, (tau) => set({ tau }), say);
  addSelect("block", Object.entries(BLOCKS), (block) => ({ block }));
  addSelect(
    "tol",
    TOLERANCES.map((t) => [t, t < 1e-3 ? t.toExponential() : t]),
    (text) => ({ tol: Number(text) }),
  );
  addSelect("undo", Object.entries(UNDO), (undo) => ({ undo }));
  addSelect(
    "x",
    FIELDS.map((f) => [f.name, view.axis(f)]),
    (x) => ({ x }),
  );
  addPresets();
  addButtons();
  app.hidden = false;
  render(follow()); // without a setting in it, the address stays as it is until something is changed
  window.addEventListener("hashchange", () => {
    if (!follow()) return;
    paperL = null;
    part("preset").value = "";
    render();
    announce();
  });
  let width = app.clientWidth;
  new ResizeObserver(() => {
    if (app.clientWidth === width) return; // the height is our own doing
    width = app.clientWidth;
    drawLater();
  }).observe(app);
  Object.defineProperty(window.lipExplorer, "state", { get: () => ({ ...state }) });
})();
