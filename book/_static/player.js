/* The equilibrium player: draws the map and the two iterations of equilibrium.js, step by step. */
(() => {
  "use strict";

  const { run, map, DEFAULTS } = window.eqPlayer;
  const { el, addSlider, readLink, writeLink } = window.lipPage;
  const app = document.getElementById("eq-player");
  if (!app) return;

  const FIELDS = [
    { name: "scale", text: "size of the linear part", min: 0, max: 2, step: 0.05 },
    { name: "angle", text: "rotation, in degrees", min: -180, max: 180, step: 5 },
    { name: "stretch", text: "wider one way, narrower the other", min: 1, max: 2, step: 0.05 },
    { name: "bend", text: "0 linear … 1 tanh", min: 0, max: 1, step: 0.05 },
    { name: "m", text: "evaluations Anderson combines", min: 1, max: 3, step: 1 },
  ];
  const START = [
    { name: "x", text: "of the start", min: -4, max: 4, step: 0.1, typed: true },
    { name: "y", text: "of the start", min: -4, max: 4, step: 0.1, typed: true },
  ];
  const ALL = [...FIELDS, ...START];
  const METHODS = ["picard", "anderson"];
  const NAMES = { picard: "Picard", anderson: "Anderson" };
  const REACH = 4; // the plane is drawn from −4 to 4
  const still = window.matchMedia("(prefers-reduced-motion: reduce)");

  const part = (name) => app.querySelector(`[data-part="${name}"]`);
  const short = (x) => String(Number(x.toFixed(3)));
  const tiny = (x) => (x >= 0.01 && x < 1e4 ? x.toPrecision(3) : x.toExponential(1).replace("e+", "e"));

  const KEYS = ALL.map(({ name }) => name);
  const FIRST = Object.fromEntries(KEYS.map((key) => [key, DEFAULTS[key]]));
  let state = { ...FIRST };
  let result = run(state);
  let playing = 0;

  const length = () => Math.max(...METHODS.map((name) => result[name].evaluations));
  let shown = length(); // evaluations of each method on display
  const seen = (name) => Math.min(shown, result[name].evaluations);

  // ---- the plane

  const SIZE = 440;
  const X = (x) => SIZE / 2 + (x / REACH) * (SIZE / 2);
  const Y = (y) => SIZE / 2 - (y / REACH) * (SIZE / 2);
  const clip = (v) => Math.max(-4000, Math.min(4000, v)).toFixed(1); // far points stay far, but are drawable

  function arrows() {
    const f = map({ ...DEFAULTS, ...state });
    const group = el("g", { class: "eq-field" });
    for (let i = -7; i <= 7; i++)
      for (let j = -7; j <= 7; j++) {
        const z = [(i * REACH) / 7.5, (j * REACH) / 7.5];
        const w = f(z);
        const v = [w[0] - z[0], w[1] - z[1]];
        const size = Math.hypot(...v);
        if (size < 1e-9) continue;
        const long = Math.min(0.42, 0.16 * size + 0.03); // short near a fixed point, never longer than the grid
        const u = v.map((t) => (t / size) * long);
        const [x1, y1, x2, y2] = [X(z[0] - u[0] / 2), Y(z[1] - u[1] / 2), X(z[0] + u[0] / 2), Y(z[1] + u[1] / 2)];
        const turn = Math.atan2(y2 - y1, x2 - x1);
        const tip = [turn + 2.6, turn - 2.6].map(
          (t) => `M${x2.toFixed(1)} ${y2.toFixed(1)}l${(4 * Math.cos(t)).toFixed(1)} ${(4 * Math.sin(t)).toFixed(1)}`,
        );
        group.append(
          el("path", { d: `M${x1.toFixed(1)} ${y1.toFixed(1)}L${x2.toFixed(1)} ${y2.toFixed(1)}${tip.join("")}` }),
        );
      }
    return group;
  }

  function drawPlane() {
    const fixed = result.fixed.map(({ z }) => `(${z.map((t) => t.toFixed(2)).join(", ")})`).join(", ");
    const svg = el(
      "svg",
      { viewBox: `0 0 ${SIZE} ${SIZE}`, role: "img", "aria-labelledby": "eq-plane-title eq-plane-desc" },
      el(
        "title",
        { id: "eq-plane-title" },
        "The plane from −4 to 4 with arrows from z towards f(z) and both iterations",
      ),
      el(
        "desc",
        { id: "eq-plane-desc" },
        `Start (${short(state.x)}, ${short(state.y)}); fixed points ${fixed || "none found"}; ${shown} evaluations shown.`,
      ),
      el("line", { x1: 0, x2: SIZE, y1: Y(0), y2: Y(0), class: "eq-axis" }),
      el("line", { x1: X(0), x2: X(0), y1: 0, y2: SIZE, class: "eq-axis" }),
      arrows(),
    );
    for (const t of [-2, 2])
      svg.append(
        el("text", { x: X(t), y: Y(0) + 14, "text-anchor": "middle" }, t),
        el("text", { x: X(0) - 6, y: Y(t) + 4, "text-anchor": "end" }, t),
      );
    for (const { z, radius } of result.fixed)
      svg.append(
        el("circle", { cx: X(z[0]), cy: Y(z[1]), r: 7, class: radius < 1 ? "eq-fixed" : "eq-fixed eq-repels" }),
      );
    for (const name of METHODS) {
      const points = result[name].points.slice(0, seen(name)).map((z) => [clip(X(z[0])), clip(Y(z[1]))]);
      svg.append(el("path", { d: "M" + points.map((z) => z.join(" ")).join("L"), class: `eq-path eq-${name}` }));
      points.forEach(([x, y], i) => {
        const now = i === points.length - 1;
        const size = now ? 5 : 2.6;
        svg.append(
          name === "picard"
            ? el("circle", { cx: x, cy: y, r: size, class: `eq-dot eq-${name}` })
            : el("rect", { x: x - size, y: y - size, width: 2 * size, height: 2 * size, class: `eq-dot eq-${name}` }),
        );
      });
    }
    svg.append(el("circle", { cx: X(state.x), cy: Y(state.y), r: 9, class: "eq-start" }));
    part("plane").replaceChildren(svg);
  }

  // ---- the residuals

  function drawResiduals() {
    const holder = part("residuals");
    const W = Math.max(260, holder.clientWidth);
    const H = W < 420 ? 260 : 300;
    const [left, right, top, bottom] = [48, W - 12, 10, H - 40];
    // as far as a run converges; of one that goes on for ever the beginning is enough
    const ends = METHODS.map((name) => (result[name].outcome === "converged" ? result[name].evaluations : 0));
    const last = Math.max(
      8,
      Math.min(length() - 1, METHODS.every((_, i) => ends[i]) ? Infinity : Math.max(40, 1.5 * Math.max(...ends))),
    );
    const all = METHODS.flatMap((name) => result[name].residuals).filter((r) => r > 0 && Number.isFinite(r));
    const [y0, y1] = [-6, Math.max(1, Math.min(7, Math.ceil(Math.log10(Math.max(...all)))))];
    const PX = (k) => left + (k / last) * (right - left);
    const PY = (r) => bottom - ((Math.min(y1, Math.max(y0, Math.log10(r))) - y0) / (y1 - y0)) * (bottom - top);
    const told = METHODS.map((name) => `${NAMES[name]} ${tiny(result[name].residuals[seen(name) - 1])}`).join(", ");
    const svg = el(
      "svg",
      { viewBox: `0 0 ${W} ${H}`, width: W, height: H, role: "img", "aria-labelledby": "eq-res-title eq-res-desc" },
      el("title", { id: "eq-res-title" }, "Residual over steps, logarithmic axis"),
      el("desc", { id: "eq-res-desc" }, `After ${shown} evaluations: ${told}. Converged below ${DEFAULTS.tol}.`),
    );
    for (let e = y0; e <= y1; e++) {
      svg.append(el("line", { x1: left, x2: right, y1: PY(10 ** e), y2: PY(10 ** e), class: "lip-grid" }));
      if (e % 2 === 0)
        svg.append(
          el("text", { x: left - 6, y: PY(10 ** e) + 4, "text-anchor": "end" }, Math.abs(e) > 2 ? `1e${e}` : 10 ** e),
        );
    }
    const gap = [1, 2, 5, 10, 20, 25, 50].find((t) => last / t <= 8) ?? 100;
    for (let k = 0; k <= last; k += gap)
      svg.append(el("text", { x: PX(k), y: bottom + 17, "text-anchor": "middle" }, k));
    svg.append(
      el("text", { x: (left + right) / 2, y: H - 5, "text-anchor": "middle" }, "step k"),
      el("line", { x1: left, x2: right, y1: PY(DEFAULTS.tol), y2: PY(DEFAULTS.tol), class: "eq-tol" }),
      el("text", { x: left + 4, y: PY(DEFAULTS.tol) + 14 }, "tolerance"),
    );
    const path = (values, kind) => {
      const d = values
        .map((r, k) => `${k ? "L" : "M"}${PX(k).toFixed(1)} ${PY(Math.max(r, 1e-12)).toFixed(1)}`)
        .join("");
      svg.append(el("path", { d, class: kind }));
    };
    if (result.bound !== null) {
      const r0 = result.picard.residuals[0];
      const until = Math.min(Math.floor(last), result.bound);
      path(
        Array.from({ length: until + 1 }, (_, k) => r0 * result.L ** k),
        "eq-banach",
      );
    }
    for (const name of METHODS) {
      const values = result[name].residuals.slice(0, Math.min(seen(name), Math.floor(last) + 1));
      path(values, `eq-path eq-${name}`);
      svg.append(
        el("circle", {
          cx: PX(values.length - 1),
          cy: PY(Math.max(values.at(-1), 1e-12)),
          r: 4,
          class: `eq-dot eq-${name}`,
        }),
      );
    }
    holder.replaceChildren(svg);
  }

  // ---- text

  let sliders = [];

  function verdict() {
    const { L, fixed } = result;
    if (L < 1) return "A contraction: exactly one fixed point, and Picard reaches it from every start.";
    if (!fixed.length) return "No contraction, and no fixed point was found: nothing to converge to.";
    const many =
      fixed.length > 1 ? `${fixed.length} fixed points were found; the numbers are those of the nearest. ` : "";
    const { radius } = fixed[0];
    if (Math.abs(radius - 1) < 1e-9) return `${many}No contraction: the fixed point neither attracts nor repels.`;
    return (
      many +
      (radius < 1
        ? "No contraction, so no promise for every start; but this fixed point attracts what is near it."
        : "No contraction, and this fixed point repels: Picard cannot settle here.")
    );
  }

  function drawText() {
    const { L, bound, fixed } = result;
    part("L").textContent = short(L);
    part("norm").textContent = fixed.length ? short(fixed[0].norm) : "–";
    part("radius").textContent = fixed.length ? short(fixed[0].radius) : "–";
    part("bound").textContent = bound === null ? "none, L ≥ 1" : `${bound} steps`;
    part("verdict").textContent = verdict();
    for (const name of METHODS) {
      const { evaluations, outcome, residuals } = result[name];
      const done = shown >= evaluations;
      part(`${name}-count`).textContent = String(seen(name));
      part(`${name}-residual`).textContent = tiny(residuals[seen(name) - 1]);
      part(`${name}-outcome`).textContent = done ? outcome : "…";
    }
    ALL.forEach(({ name }, i) => sliders[i](state[name]));
    part("play").textContent = playing ? "Pause" : "Play";
    part("step").disabled = part("end").disabled = shown >= length();
  }

  let timer = 0;
  function say(text) {
    clearTimeout(timer);
    part("live").textContent = text;
  }
  function announce() {
    clearTimeout(timer);
    timer = setTimeout(() => {
      const told = METHODS.map((name) => {
        const { evaluations, outcome } = result[name];
        return `${NAMES[name]}: ${seen(name)} evaluations, ${shown >= evaluations ? outcome : "not finished"}`;
      });
      say(`L = ${short(result.L)}. ${verdict()} ${told.join("; ")}.`);
    }, 700);
  }

  function render() {
    drawPlane();
    drawResiduals();
    drawText();
    if (!playing) announce();
  }

  // ---- what a reader does

  function pause() {
    clearInterval(playing);
    playing = 0;
  }

  function set(change, link = true) {
    pause();
    const whole = shown >= length(); // who looks at the end stays at the end
    state = { ...state, ...change };
    result = run(state);
    shown = whole ? length() : Math.min(shown, length());
    if (link) writeLink(state, KEYS);
    render();
  }

  function show(count) {
    shown = Math.max(1, Math.min(length(), count));
    render();
  }

  function play() {
    if (playing) {
      pause();
      return render();
    }
    if (shown >= length()) shown = 1;
    if (still.matches) return show(length()); // no moving picture for those who asked for none
    playing = setInterval(() => {
      const next = shown + Math.max(1, Math.floor(shown / 15)); // long runs speed up
      if (next >= length()) pause();
      show(next);
    }, 350);
    render();
  }

  /** Takes the setting in the address, if there is one. */
  function follow() {
    const found = readLink(ALL);
    if (found) set(Object.fromEntries(KEYS.map((key) => [key, found[key] ?? FIRST[key]])), false);
    return found !== null;
  }

  const inside = (t) => Number(Math.max(-REACH, Math.min(REACH, t)).toFixed(2));
  part("plane").addEventListener("click", (event) => {
    const box = part("plane").querySelector("svg").getBoundingClientRect();
    const [u, v] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    set({ x: inside((2 * u - 1) * REACH), y: inside((1 - 2 * v) * REACH) });
  });
  part("plane").addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (!move || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation(); // the book turns its pages with the arrow keys
    const far = event.shiftKey ? 1 : 0.1;
    set({ x: inside(state.x + far * move[0]), y: inside(state.y + far * move[1]) });
  });
  sliders = ALL.map((f) => addSlider(part("sliders"), f, (value) => set({ [f.name]: value }), say));
  part("step").addEventListener("click", () => (pause(), show(shown + 1)));
  part("play").addEventListener("click", play);
  part("end").addEventListener("click", () => (pause(), show(length())));
  part("back").addEventListener("click", () => (pause(), show(1)));
  part("reset").addEventListener("click", () => {
    shown = length();
    set(FIRST);
    history.replaceState(null, "", location.pathname + location.search);
  });

  app.hidden = false;
  if (!follow()) render();
  window.addEventListener("hashchange", () => {
    if (follow()) show(length());
  });
  let width = 0;
  new ResizeObserver(() => {
    if (part("residuals").clientWidth === width) return;
    width = part("residuals").clientWidth;
    drawResiduals();
  }).observe(part("residuals"));
  Object.defineProperty(window.eqPlayer, "state", { get: () => ({ ...state, shown, playing: playing !== 0 }) });
})();
