/* The displays of the Lipschitz explorer for the certified family, block "potential", where L is tau. */
(() => {
  "use strict";

  const { potential, view } = window.lipExplorer;
  const { el, short } = window.lipPage;
  if (!view) return;

  const { part, show, swatch } = view;
  const TAU = { name: "tau", symbol: "τ", text: "Lipschitz constant of f", min: 0.01, max: 0.99, step: 0.01 };
  const CURVES = { reported: ["Picard steps", (r) => r.steps], spectral: ["1/(1 − τ)", (r) => r.error_factor] };
  const power = (tol) => (tol < 1e-3 ? tol.toExponential() : String(tol));

  function cards(r, { tol }) {
    const card = (name, head, value, text, kind = "") =>
      el(
        "div",
        { class: `lip-card ${kind}`, "data-card": name },
        el("span", {}, head),
        el("b", {}, value),
        el("small", {}, text),
      );
    part("cards").replaceChildren(
      card("tau", "L, train and test", show(r.L), "contraction", "lip-yes"),
      card("tau-steps", "Picard steps", short(r.steps), `to ${power(tol)}`),
      card("tau-factor", "error / residual", `≤ ${show(r.error_factor)}`, "1/(1 − τ)"),
    );
  }

  /** Steps to every tolerance that can be chosen. */
  function table(state, tolerances) {
    const rows = [
      ["residual", tolerances.map(power)],
      ["Picard steps", tolerances.map((tol) => short(potential({ ...state, tol }).steps))],
    ];
    const line = ([head, cells], i) =>
      el("tr", {}, el("th", { scope: "row" }, head), ...cells.map((x) => el(i ? "td" : "th", i ? {} : { scope: "col" }, x)));
    const [head, body] = rows.map(line);
    part("tau-steps").replaceChildren(el("thead", {}, head), el("tbody", {}, body));
  }

  /** Frame, grid and labels of the plot on a logarithmic axis from 1 to 10^top. */
  function frame(box, top, now) {
    const { W, H, left, right, bottom, X, Y } = box;
    const svg = el("svg", { viewBox: `0 0 ${W} ${H}`, width: W, height: H, role: "img" });
    const write = (x, y, anchor, text) => svg.append(el("text", { x, y, "text-anchor": anchor }, text));
    for (let v = 0; v <= top; v++) {
      const y = Y(10 ** v);
      svg.append(el("line", { x1: left, x2: right, y1: y, y2: y, class: "lip-grid" }));
      write(left - 6, y + 4, "end", String(10 ** v));
    }
    for (let x = 0; x <= 5; x++) write(X(x / 5), bottom + 17, "middle", short(x / 5));
    write((left + right) / 2, H - 7, "middle", `${view.axis(TAU)}: ${TAU.text}`);
    svg.append(el("line", { x1: X(now), x2: X(now), y1: box.top, y2: bottom, class: "lip-now" }));
    return svg;
  }

  /** Steps and 1/(1 − tau) over tau; returns the map from a click to a value of tau. */
  function plot(state) {
    const holder = part("tau-plot");
    const W = Math.max(280, holder.clientWidth);
    const H = W < 480 ? 280 : 330;
    const box = { W, H, left: 52, right: W - 14, top: 10, bottom: H - 44 };
    const at = (tau) => potential({ ...state, tau });
    const top = Math.ceil(Math.log10(at(TAU.max).steps));
    box.X = (x) => box.left + x * (box.right - box.left);
    box.Y = (y) => box.bottom - (Math.log10(y) / top) * (box.bottom - box.top);
    const svg = frame(box, top, state.tau);
    const here = at(state.tau);
    const told = `At tau = ${short(state.tau)}: ${here.steps} steps to ${power(state.tol)}, error at most ${show(here.error_factor)} times the residual.`;
    svg.setAttribute("aria-labelledby", "lip-tau-title lip-tau-desc");
    svg.prepend(
      el("title", { id: "lip-tau-title" }, "Guaranteed Picard steps and 1/(1 − τ) over τ, logarithmic axis"),
      el("desc", { id: "lip-tau-desc" }, told),
    );
    const taus = Array.from({ length: 99 }, (_, i) => (i + 1) / 100);
    const values = taus.map(at);
    for (const [name, [, value]] of Object.entries(CURVES)) {
      const d = values.map((r, i) => `${i ? "L" : "M"}${box.X(taus[i]).toFixed(1)} ${box.Y(value(r)).toFixed(1)}`);
      svg.append(el("path", { d: d.join(""), class: `lip-line lip-${name}` }));
      svg.append(el("circle", { cx: box.X(state.tau), cy: box.Y(value(here)), r: 4.5, class: `lip-dot lip-${name}` }));
    }
    holder.replaceChildren(svg);
    part("tau-legend").replaceChildren(
      ...Object.entries(CURVES).map(([name, [text]]) => el("span", {}, swatch(name), ` ${text}`)),
    );
    return (clientX) => {
      const x = (clientX - holder.getBoundingClientRect().left - box.left) / (box.right - box.left);
      return Number(Math.min(TAU.max, Math.max(TAU.min, x)).toFixed(2));
    };
  }

  /** The same numbers in Python. */
  function python(state) {
    part("python").textContent =
      `from lipmdeq.bounds import PotentialSpec\n\n` +
      `spec = PotentialSpec(tau=${short(state.tau)})\n` +
      `print(spec.L(), spec.steps(tol=${state.tol}), spec.error_factor)`;
  }

  /** One sentence for a screen reader. */
  const summary = (r, state) =>
    `L = ${show(r.L)} in both modes, contraction, ${r.steps} steps to ${power(state.tol)}, ` +
    `error at most ${show(r.error_factor)} times the residual.`;

  window.lipExplorer.potentialView = { TAU, cards, table, plot, python, summary };
})();
