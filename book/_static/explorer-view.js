/* The displays of the Lipschitz explorer: readings, plot, factors, matrix. Each function draws one state. */
(() => {
  "use strict";

  const { constants, feasible, READINGS } = window.lipExplorer;
  const { el, short } = window.lipPage;
  const app = document.getElementById("lip-explorer");
  if (!app) return;

  const NAMES = { printed: "printed", reported: "reported", spectral: "spectral", perron: "Perron" };
  const SUB = "₁₂₃₄₅₆₇₈";
  const part = (name) => app.querySelector(`[data-part="${name}"]`);
  const swatch = (name) => {
    const line = el("line", { x1: 0, x2: 28, y1: 4, y2: 4, class: `lip-line lip-${name}` });
    return el("svg", { class: "lip-swatch", width: 28, height: 8, "aria-hidden": "true" }, line);
  };

  /** Four digits; more where they are needed to see on which side of 1 a number lies. */
  function show(x) {
    if (x === Infinity) return "∞";
    if (x >= 1e5 || (x > 0 && x < 1e-4)) return x.toExponential(2).replace("e+", "e");
    const near = Math.abs(x - 1);
    return x.toPrecision(near > 0 && near < 5e-3 ? Math.min(15, 2 - Math.floor(Math.log10(near))) : 4);
  }
  const verdict = (L) => (L < 1 ? "contraction" : L === Infinity ? "no bound" : "no guarantee");
  const proves = (r, name, L) => L < 1 && (name !== "printed" || r.printed_is_bound);
  const axis = (f) => (f.symbol === f.name ? f.name : `${f.name} (${f.symbol})`);

  function cards(r, { mode }) {
    const card = (name) => {
      const L = r.L[mode][name];
      return el(
        "div",
        { class: `lip-card ${proves(r, name, L) ? "lip-yes" : "lip-no"}`, "data-card": name },
        el("span", {}, swatch(name), ` ${NAMES[name]}`),
        el("b", {}, show(L)),
        el("small", {}, L < 1 && !proves(r, name, L) ? "not a bound" : L >= 1 && L < Infinity ? "L ≥ 1" : verdict(L)),
      );
    };
    part("cards").replaceChildren(...READINGS.map(card));
  }

  function readings(r, state, paperL) {
    const line = (name) => {
      const value = (mode) => {
        const L = r.L[mode][name];
        return el("td", { class: proves(r, name, L) ? "lip-yes" : "lip-no", "data-value": `${mode}-${name}` }, show(L));
      };
      const count = (mode) => {
        const k = r.steps[mode][name];
        const text = k === null ? "–" : proves(r, name, r.L[mode][name]) ? short(k) : `(${short(k)})`;
        return el("td", { "data-steps": `${mode}-${name}` }, text);
      };
      const head = el("th", { scope: "row" }, NAMES[name]);
      const range = el("td", { "data-range": name });
      return el("tr", {}, head, value("train"), value("test"), count("train"), count("test"), range);
    };
    part("readings").replaceChildren(...READINGS.map(line));
    const notes = [];
    if (!r.printed_is_bound && r.steps.test.printed !== null) {
      notes.push("In brackets: not proved, since the printed formula leaves out the conv and norm of the up path.");
    }
    if (r.steps.test.perron !== null && r.D.length > 1) {
      const D = r.D.map((x) => Number(x.toPrecision(3))).join(", ");
      const l2 = `${r.steps_l2.train ?? "–"} (train) and ${r.steps_l2.test ?? "–"} (test)`;
      notes.push(`Perron steps are counted in the norm with weights D = (${D}); in plain l2 they are ${l2}.`);
    }
    if (paperL !== null) {
      notes.push(`The paper states L = ${paperL}; its formula, as reported, gives ${show(r.L.train.reported)}.`);
    }
    part("note").textContent = notes.join(" ");
  }

  /** The values of the plotted parameter with L < 1, rounded to the safe side. */
  function ranges(state, f) {
    part("range-head").textContent = `${state.x} with L < 1 (${state.mode})`;
    for (const name of READINGS) {
      let text = "none";
      if (f.name === "n") {
        const all = Array.from({ length: f.max - f.min + 1 }, (_, i) => f.min + i);
        const good = all.filter((n) => constants({ ...state, n }, [name])[state.mode][name] < 1);
        if (good.length) text = good.length === all.length ? "all" : good.join(", ");
      } else {
        const found = feasible(state, f.name, name, state.mode, f.min, f.max);
        if (found) {
          const low = short(Math.ceil(found[0] * 1e4) / 1e4);
          const high = short(Math.floor(found[1] * 1e4) / 1e4);
          const [from, to] = [found[0] > f.min, found[1] < f.max];
          text = from && to ? `${low} … ${high}` : from ? `≥ ${low}` : to ? `≤ ${high}` : "all";
        }
      }
      app.querySelector(`[data-range="${name}"]`).textContent = text;
    }
  }

  /** L = L̂ ‖M‖ L̄: bars on a logarithmic axis add up as the factors multiply. */
  function factors(r, { mode, undo }) {
    const list = [
      ["L̂", "residual block", r.L_hat[mode]],
      ["‖M‖", "fusion (Perron)", r.norm.perron],
      ["L̄", "post-fusion", r.L_bar],
      ["L", "their product", r.L[mode].perron],
    ];
    const logs = list.map(([, , x]) => Math.abs(Math.log10(x)));
    const reach = Math.max(0.35, ...logs.filter(Number.isFinite));
    const line = ([symbol, text, x], i) => {
      const size = 50 * Math.min(1, logs[i] / reach);
      const shrinks = x < 1;
      const style = `width:${size}%;${shrinks ? "right" : "left"}:50%`;
      const bar = el("span", { class: shrinks ? "lip-shrinks" : "lip-grows", style });
      const head = el("th", { scope: "row" }, el("b", {}, symbol), ` ${text}`);
      const cell = el("td", { class: "lip-bar", "aria-hidden": "true" }, el("div", {}, bar));
      return el("tr", {}, head, el("td", {}, show(x)), cell);
    };
    part("factors").replaceChildren(...list.map(line));
    const formula = undo === "none" ? " = (1−α₁)γ̄a + α₁γ̄³c²a²/(1−p)" : "";
    part("terms-text").textContent = `Inside L̂${formula}, two paths:`;
    const { skip, branch } = r.terms[mode];
    const share = Number.isFinite(branch) ? (100 * skip) / (skip + branch) : 0;
    part("terms").firstElementChild.style.width = `${share}%`;
    part("skip").textContent = `${show(skip)} (${share.toFixed(0)} %)`;
    part("branch").textContent = `${show(branch)} (${(100 - share).toFixed(0)} %)`;
    part("norms").textContent = READINGS.map((name) => `${NAMES[name]} ${show(r.norm[name])}`).join(" · ");
  }

  function matrix(r) {
    const M = r.M.full;
    const top = Math.max(...M.flat());
    const digits = M.length > 5 ? 2 : 3;
    const text = (x) => {
      if (x === Infinity) return "∞";
      if (x >= 1e4 || x < 5e-3) return x.toExponential(0).replace("e+", "e");
      if (x >= 10 ** digits) return String(Math.round(x));
      return (x < 1 ? x.toFixed(digits) : x.toPrecision(digits)).replace(/^0\./, ".");
    };
    const cell = (x, kind) => {
      const heat = Number.isFinite(top) ? Math.sqrt(x / top) : Number(x === Infinity);
      return el("td", { style: `--heat:${(55 * heat).toFixed(1)}%`, "data-kind": kind }, text(x));
    };
    const kind = (i, j) => (i === j ? "own" : j < i ? "down" : "up");
    const head = M.map((_, j) => el("th", { scope: "col" }, `z${SUB[j]}`));
    const body = M.map((row, i) =>
      el("tr", {}, el("th", { scope: "row" }, `f${SUB[i]}`), ...row.map((x, j) => cell(x, kind(i, j)))),
    );
    part("matrix").replaceChildren(el("thead", {}, el("tr", {}, el("td"), ...head)), el("tbody", {}, ...body));
    part("matrix").classList.toggle("lip-large", M.length > 5);
  }

  /** L over one parameter; returns the map from a click to a value of that parameter. */
  function plot(state, f, paperL) {
    const holder = part("plot");
    const W = Math.max(280, holder.clientWidth);
    const H = W < 480 ? 280 : 330;
    const [left, right, top, bottom] = [48, W - 14, 10, H - 44];
    const whole = f.name === "n";
    const [low, high] = whole ? [f.min - 0.3, f.max + 0.3] : [f.min, f.max];
    const N = whole ? f.max - f.min : 80;
    const xs = Array.from({ length: N + 1 }, (_, i) => (whole ? f.min + i : low + ((high - low) * i) / N));
    const curves = xs.map((x) => constants({ ...state, [f.name]: x })[state.mode]);
    const here = constants(state)[state.mode];
    const now = state[f.name];
    const good = (L) => Number.isFinite(L) && L > 0;
    const finite = [...curves, here].flatMap((L) => Object.values(L)).filter(good);
    const current = Math.max(0, ...Object.values(here).filter(good), paperL ?? 0);
    const log = state.y === "log" || current > 100; // a linear axis that reaches so far shows nothing of L < 1
    const t = log ? Math.log10 : (L) => L;
    const y0 = log ? Math.max(-6, Math.floor(2 * Math.log10(Math.min(0.5, ...finite))) / 2) : 0;
    const y1 = log
      ? Math.min(30, Math.ceil(2 * Math.log10(Math.max(2, ...finite)) + 0.2) / 2)
      : Math.max(2, 1.15 * current);
    const X = (x) => left + ((x - low) / (high - low)) * (right - left);
    const Y = (L) => bottom - ((Math.min(y1, Math.max(y0, t(L))) - y0) / (y1 - y0)) * (bottom - top);

    const over = (L) => bottom - ((Math.min(y1 + 9 * (y1 - y0), Math.max(y0, t(L))) - y0) / (y1 - y0)) * (bottom - top);
    // a nested svg clips what leaves the frame
    const curvesBox = el("svg", {
      x: 0,
      y: top,
      width: W,
      height: bottom - top + 4,
      viewBox: `0 ${top} ${W} ${bottom - top + 4}`,
    });

    const told = READINGS.map((name) => `${NAMES[name]} ${show(here[name])}`).join(", ");
    const svg = el(
      "svg",
      { viewBox: `0 0 ${W} ${H}`, width: W, height: H, role: "img", "aria-labelledby": "lip-title lip-desc" },
      el("title", { id: "lip-title" }, `L over ${f.name}, ${state.mode} mode, ${log ? "logarithmic" : "linear"} axis`),
      el("desc", { id: "lip-desc" }, `At ${f.name} = ${short(now)}: ${told}. The region L < 1 is shaded.`),
      el("rect", { x: left, width: right - left, y: Y(1), height: bottom - Y(1), class: "lip-region" }),
    );
    const write = (x, y, anchor, text, kind = "") =>
      svg.append(el("text", { x, y, "text-anchor": anchor, class: kind }, text));
    const line = (x1, x2, a, b, kind) => svg.append(el("line", { x1, x2, y1: a, y2: b, class: kind }));

    const gap = (steps) => steps.find((step) => (y1 - y0) / step <= 8);
    const every = gap(log ? [1, 2, 3, 4, 5] : [0.25, 0.5, 1, 2, 5, 10, 20]);
    for (let v = Math.ceil(y0 / every) * every; v <= y1; v += every) {
      const L = log ? 10 ** v : v;
      line(left, right, Y(L), Y(L), "lip-grid");
      if (Math.abs(Y(L) - Y(1)) > 12) write(left - 6, Y(L) + 4, "end", log && Math.abs(v) > 3 ? `1e${v}` : short(L));
    }
    line(left, right, Y(1), Y(1), "lip-one");
    write(left - 6, Y(1) + 4, "end", "1", "lip-region-text");
    const tick = whole ? 1 : high > 3 ? 1 : high > 1 ? 0.5 : 0.2;
    for (let x = tick * Math.ceil(low / tick); x <= high; x += tick) write(X(x), bottom + 17, "middle", short(x));
    write((left + right) / 2, H - 7, "middle", `${axis(f)}: ${f.text}`);
    write(right - 8, bottom - 9, "end", "L < 1: contraction", "lip-region-text");
    line(X(now), X(now), top, bottom, "lip-now");
    for (const name of READINGS) {
      const points = xs.map((x, i) => [x, curves[i][name]]).filter(([, L]) => Number.isFinite(L));
      const d = points.map(([x, L], i) => `${i ? "L" : "M"}${X(x).toFixed(1)} ${over(L).toFixed(1)}`).join("");
      if (d) curvesBox.append(el("path", { d, class: `lip-line lip-${name}` }));
      if (whole)
        for (const [x, L] of points)
          curvesBox.append(el("circle", { cx: X(x), cy: over(L), r: 2.5, class: `lip-dot lip-${name}` }));
    }
    svg.append(curvesBox);
    for (const name of READINGS)
      if (Number.isFinite(here[name]))
        svg.append(el("circle", { cx: X(now), cy: Y(here[name]), r: 4.5, class: `lip-dot lip-${name}` }));
    if (paperL !== null) svg.append(el("circle", { cx: X(now), cy: Y(paperL), r: 8, class: "lip-paper" }));
    if (!finite.length) write((left + right) / 2, top + 40, "middle", "no bound: a constant is infinite");
    holder.replaceChildren(svg);

    const legend = READINGS.map((name) => el("span", {}, swatch(name), ` ${NAMES[name]}`));
    if (paperL !== null) {
      const ring = el("circle", { cx: 9, cy: 9, r: 7, class: "lip-paper" });
      const box = el("svg", { class: "lip-swatch", width: 18, height: 18, "aria-hidden": "true" }, ring);
      legend.push(el("span", {}, box, " the paper's number"));
    }
    part("legend").replaceChildren(...legend);
    return (clientX) => {
      const x = low + ((clientX - holder.getBoundingClientRect().left - left) / (right - left)) * (high - low);
      return Number((Math.round(Math.min(f.max, Math.max(f.min, x)) / f.step) * f.step).toFixed(4));
    };
  }

  /** The same numbers in Python. */
  function python(state, fields) {
    const values = fields.map((f) => `${f.name}=${short(state[f.name])}`);
    if (!state.post_affine) values.push("post_affine=False");
    const test = state.mode === "test" ? ", train=False" : "";
    const L = state.undo === "none" ? `.L("perron"${test})` : `.ablation("${state.undo}"${test}).L("perron")`;
    part("python").textContent =
      `from lipmdeq.bounds import LipschitzSpec, steps\n\n` +
      `spec = LipschitzSpec(${values.join(", ")})\nL = spec${L}\nprint(L, steps(L, tol=${state.tol}))`;
  }

  /** One sentence for a screen reader. */
  function summary(r, state) {
    const told = (mode) => {
      const [L, k] = [r.L[mode].perron, r.steps[mode].perron];
      return `${mode} mode ${show(L)}, ${verdict(L)}` + (k === null ? "" : `, ${k} steps to ${state.tol}`);
    };
    return `Perron constant: ${told("train")}; ${told("test")}. As reported: ${show(r.L.train.reported)} in train mode.`;
  }

  const draw = { cards, readings, ranges, factors, matrix, plot, python, summary };
  Object.assign(window.lipExplorer, { view: { app, part, axis, show, swatch, ...draw } });
})();
