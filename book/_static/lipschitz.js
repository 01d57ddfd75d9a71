/* The closed forms of lipmdeq.bounds in plain JavaScript: the same definitions as in lipmdeq/bounds: operations.py, spec.py,
   matrices.py and banach.py. tests/test_interactive.py compares the numbers in a browser. */
(() => {
  "use strict";

  const READINGS = ["printed", "reported", "spectral", "perron"];
  const ABLATIONS = ["none", "S1", "S2", "S3", "S4", "S4-sum", "S5", "S6", "S6-sum", "S7", "S7-sum", "MDEQ"];
  const EPS_GN = 1e-5;

  /** Product of constants; 0 (a constant map) times infinity (no bound) is 0. */
  const product = (...factors) => (factors.includes(0) ? 0 : factors.reduce((x, y) => x * y, 1));

  /** n × n matrix from its entries. */
  function square(n, entry) {
    const A = [];
    for (let i = 0; i < n; i++) {
      const row = new Array(n);
      for (let j = 0; j < n; j++) row[j] = entry(i, j);
      A.push(row);
    }
    return A;
  }

  const largest = (A) => {
    let top = 0;
    for (const row of A) for (const x of row) if (x > top) top = x;
    return top;
  };

  /** w_ij ∝ exp(−max(j−i, 0)) over j ≠ i: the softmax weights of the fusion. */
  function fusionWeights(n) {
    const w = square(n, (i, j) => (i === j ? 0 : Math.exp(-Math.max(j - i, 0))));
    return w.map((row) => {
      const sum = row.reduce((x, y) => x + y, 0);
      return row.map((x) => (sum > 0 ? x / sum : 0));
    });
  }

  function check(s) {
    const fail = (name, range) => {
      throw new RangeError(`${name} = ${s[name]}: must be ${range}`);
    };
    const number = (name) => typeof s[name] === "number" && Number.isFinite(s[name]);
    if (!number("a") || !(s.a > 0 && s.a <= 1)) fail("a", "in (0, 1]");
    for (const name of ["c", "gamma", "tol"]) if (!number(name) || !(s[name] > 0)) fail(name, "in (0, inf)");
    for (const name of ["alpha1", "alpha2"])
      if (!number(name) || !(s[name] > 0 && s[name] < 1)) fail(name, "in (0, 1)");
    if (!Number.isInteger(s.n) || s.n < 1 || s.n > 64) fail("n", "a whole number >= 1 and <= 64");
    if (!number("p") || !(s.p >= 0 && s.p < 1)) fail("p", "in [0, 1)");
    if (!ABLATIONS.includes(s.undo)) fail("undo", `one of ${ABLATIONS.join(", ")}`);
    return s;
  }

  /** Constants of the operations in f (spec.Operations), with one change of the paper undone if asked. */
  function operations(s, train) {
    const o = {
      norm: s.gamma,
      act: s.a,
      drop: train ? 1 / (1 - s.p) : 1,
      conv: s.c,
      convResidual: s.c,
      convDown: s.c,
      postNorm: s.post_affine ? s.gamma : 1,
      mix1: [1 - s.alpha1, s.alpha1],
      mix2: [1 - s.alpha2, s.alpha2],
      weights: fusionWeights(s.n),
    };
    const all = s.undo === "MDEQ";
    if (s.undo === "S1") [o.norm, o.postNorm] = [Infinity, s.post_affine ? Infinity : 1];
    if (s.undo === "S2" || all) [o.norm, o.postNorm] = [o.norm / Math.sqrt(EPS_GN), o.postNorm / Math.sqrt(EPS_GN)];
    if (s.undo === "S3") o.conv = o.convResidual = o.convDown = Infinity;
    const [row, fusion] = s.undo.split("-");
    const share = s.undo === "S4" ? 1 / Math.max(s.n - 1, 1) : 1;
    if (row === "S4" || fusion === "sum" || all) o.weights = square(s.n, (i, j) => (i === j ? 0 : share));
    if (row === "S5" || row === "S7" || all) o.mix1 = [1, 1];
    if (row === "S6" || row === "S7" || all) o.mix2 = [1, 1];
    if (all) o.act = 1;
    return o;
  }

  /** L̂ as the sum of its two terms: what comes through the skip connection, what through the branch. */
  function residualTerms(o) {
    const outer = product(o.norm, o.act);
    const branch = product(o.mix1[1], o.norm, o.convResidual, o.act, o.norm, o.convResidual, o.drop);
    return { skip: product(outer, o.mix1[0]), branch: product(outer, branch) };
  }

  /** M (n × n): skip weight on the diagonal, down paths (j < i) below it, up paths (j > i) above it. */
  function fusionMatrix(o, full) {
    const down = (d) => product(o.norm, o.convDown, ...Array(d - 1).fill(product(o.act, o.norm, o.convDown)));
    const up = (d) => product(2 ** d, ...(full ? [o.conv, o.norm] : []));
    return square(o.weights.length, (i, j) =>
      i === j ? o.mix2[0] : product(o.mix2[1], o.weights[i][j], j < i ? down(i - j) : up(j - i)),
    );
  }

  /** Runs `norm` on M scaled to entries ≤ 1, so that squares neither overflow nor vanish. */
  function scaled(M, norm) {
    const scale = largest(M);
    if (M.length === 1 || scale === 0 || !Number.isFinite(scale)) return scale;
    return scale * norm(M.map((row) => row.map((x) => x / scale)));
  }

  const frobenius = (M) => scaled(M, (A) => Math.sqrt(A.flat().reduce((sum, x) => sum + x * x, 0)));

  /** ‖M‖₂: the root of the largest eigenvalue of MᵀM, by cyclic Jacobi rotations. */
  const spectral = (M) =>
    scaled(M, (A) => {
      const n = A.length;
      const G = square(n, (i, j) => A.reduce((sum, row) => sum + row[i] * row[j], 0));
      for (let sweep = 0; sweep < 60; sweep++) {
        let off = 0;
        let diagonal = 0;
        for (let i = 0; i < n; i++)
          for (let j = 0; j < n; j++) i === j ? (diagonal += G[i][i] ** 2) : (off += G[i][j] ** 2);
        if (off <= 1e-30 * diagonal) break;
        for (let p = 0; p < n - 1; p++)
          for (let q = p + 1; q < n; q++) {
            if (G[p][q] === 0) continue;
            const theta = (G[q][q] - G[p][p]) / (2 * G[p][q]);
            const t = (theta < 0 ? -1 : 1) / (Math.abs(theta) + Math.hypot(theta, 1));
            const cos = 1 / Math.hypot(t, 1);
            const sin = t * cos;
            for (let k = 0; k < n; k++) {
              const [x, y] = [G[k][p], G[k][q]];
              [G[k][p], G[k][q]] = [cos * x - sin * y, sin * x + cos * y];
            }
            for (let k = 0; k < n; k++) {
              const [x, y] = [G[p][k], G[q][k]];
              [G[p][k], G[q][k]] = [cos * x - sin * y, sin * x + cos * y];
            }
          }
      }
      return Math.sqrt(Math.max(...G.map((row, i) => row[i])));
    });

  const times = (A, x) =>
    A.map((row) => {
      let sum = 0;
      for (let j = 0; j < x.length; j++) sum += row[j] * x[j];
      return sum;
    });
  const transpose = (A) => square(A.length, (i, j) => A[j][i]);

  /** A², divided by its largest entry, and that entry. */
  function squared(A) {
    const T = transpose(A);
    const B = A.map((row) => times(T, row));
    const top = largest(B);
    for (const row of B) for (let j = 0; j < row.length; j++) row[j] /= top;
    return [B, top];
  }

  /** Perron root ρ(M) and the weights D = √(l/r), min 1, in whose norm ‖DMD⁻¹‖₂ = ρ(M) (matrices.perron).

      Repeated squaring: (A + shift I)^(2^k), scaled, tends to r lᵀ with the right and left Perron vectors, because a
      matrix with positive entries is primitive. Nothing is ever subtracted, hence even tiny entries of r and l keep
      their digits. ρ is the upper end of the Collatz–Wielandt bracket min (Ar)_i/r_i ≤ ρ ≤ max (Ar)_i/r_i. */
  function perron(M) {
    let D = M.map(() => 1);
    const value = scaled(M, (A) => {
      // An eigenvalue near −ρ would cost digits; a shift by about ρ, the growth of A^256, moves it to 0.
      let [B, top, log] = [A, 1, 0];
      for (let k = 1; k <= 8; k++) {
        [B, top] = squared(B);
        log += Math.log(top) / 2 ** k;
      }
      B = square(A.length, (i, j) => A[i][j] + (i === j ? Math.exp(log) : 0));
      const ones = A.map(() => 1);
      const T = transpose(A);
      const ratios = (matrix, x) => times(matrix, x).map((y, i) => y / x[i]);
      const width = (list) => Math.max(...list) / Math.min(...list) - 1;
      for (let k = 0; ; k++) {
        const [r, l] = [times(B, ones), times(transpose(B), ones)];
        const right = ratios(A, r);
        if (k === 60 || (width(right) <= 1e-14 && width(ratios(T, l)) <= 1e-14)) {
          const d = l.map((x, i) => Math.sqrt(x / r[i]));
          if (d.every((x) => x > 0 && Number.isFinite(x))) D = d.map((x) => x / Math.min(...d));
          return Math.max(...right);
        }
        [B] = squared(B);
      }
    });
    return { value, D };
  }

  /** (1+L)L^k / (1−L^(k+1)): bound of the relative residual after k Picard steps from z_0 = 0. */
  function residualBound(L, k, cond) {
    const below = L > 0 ? -Math.expm1((k + 1) * Math.log(L)) : 1;
    return (cond * (1 + L) * L ** k) / below;
  }

  /** Smallest k with residualBound ≤ tol; null if L ≥ 1. */
  function steps(L, tol, cond = 1) {
    if (!(L < 1)) return null;
    const guess = L > 0 ? (Math.log(tol) - Math.log(cond * (1 + L) + tol * L)) / Math.log(L) : 1;
    let k = Math.max(0, Math.ceil(guess));
    if (k > 1e12) return k; // counting one by one has no meaning any more
    while (k > 0 && residualBound(L, k - 1, cond) <= tol) k--;
    while (!(residualBound(L, k, cond) <= tol)) k++;
    return k;
  }

  const DEFAULTS = {
    block: "paper",
    tau: 0.9,
    a: 0.4,
    c: 2,
    gamma: 1,
    alpha1: 0.5,
    alpha2: 0.3,
    n: 4,
    p: 0.3,
    tol: 1e-3,
    undo: "none",
    post_affine: true,
  };
  const each = (keys, value) => Object.fromEntries(keys.map((key) => [key, value(key)]));

  const MODES = ["train", "test"];

  /** What L is made of, for the readings asked for. */
  function factors(params, readings) {
    const s = check({ ...DEFAULTS, ...params });
    const o = { train: operations(s, true), test: operations(s, false) };
    const M = { printed: fusionMatrix(o.test, false), full: fusionMatrix(o.test, true) };
    const root = readings.includes("perron") ? perron(M.full) : null;
    const norms = {
      printed: () => frobenius(M.printed),
      reported: () => frobenius(M.full),
      spectral: () => Math.min(spectral(M.full), frobenius(M.full)),
      perron: () => root.value,
    };
    const norm = each(readings, (name) => norms[name]());
    const terms = each(MODES, (mode) => residualTerms(o[mode]));
    const L_hat = each(MODES, (mode) => terms[mode].skip + terms[mode].branch);
    const L_bar = product(o.test.postNorm, o.test.conv, o.test.act);
    const L = each(MODES, (mode) => each(readings, (name) => product(L_hat[mode], norm[name], L_bar)));
    // the printed up path leaves out a conv and a norm: a bound only where these do not expand
    const printed_is_bound = s.n === 1 || o.test.conv * o.test.norm <= 1;
    return { s, L, L_hat, L_bar, terms, norm, M, D: root?.D, printed_is_bound };
  }

  /** L alone: {train, test} × readings. */
  const constants = (params, readings = READINGS) => factors(params, readings).L;

  /** Every number of the page. Keys as in LipschitzSpec; left-out ones have its defaults; tol for the steps. */
  function compute(params = {}) {
    const { s, ...r } = factors(params, READINGS);
    const cond_D = Math.max(...r.D);
    return {
      ...r,
      cond_D,
      steps: each(MODES, (mode) => each(READINGS, (name) => steps(r.L[mode][name], s.tol))),
      steps_l2: each(MODES, (mode) => steps(r.L[mode].perron, s.tol, cond_D)),
    };
  }

  /** The certified family (spec.PotentialSpec): L = tau in both modes, whatever the weights; tol for the steps. */
  function potential({ tau = DEFAULTS.tau, tol = DEFAULTS.tol } = {}) {
    const number = (x) => typeof x === "number" && Number.isFinite(x);
    if (!number(tau) || !(tau > 0 && tau < 1)) throw new RangeError(`tau = ${tau}: must be in (0, 1)`);
    if (!number(tol) || !(tol > 0)) throw new RangeError(`tol = ${tol}: must be in (0, inf)`);
    return { L: tau, steps: steps(tau, tol), error_factor: 1 / (1 - tau) };
  }

  /** Values of one field (not n) in [low, high] with L < 1, the others fixed: [smallest, largest], or null.

      They form an interval (lipmdeq.bounds.feasible says why), so a scan finds it and bisection its ends. */
  function feasible(params, field, reading, mode, low, high) {
    const holds = (x) => constants({ ...params, [field]: x }, [reading])[mode][reading] < 1;
    const grid = Array.from({ length: 33 }, (_, i) => low + ((high - low) * i) / 32);
    grid.push(Math.min(high, Math.max(low, params[field] ?? DEFAULTS[field])));
    grid.sort((x, y) => x - y);
    const good = grid.map(holds);
    const [first, last] = [good.indexOf(true), good.lastIndexOf(true)];
    if (first < 0) return null;
    const edge = (inside, outside) => {
      for (let i = 0; outside !== undefined && i < 40; i++) {
        const middle = (inside + outside) / 2;
        if (holds(middle)) inside = middle;
        else outside = middle;
      }
      return inside;
    };
    return [edge(grid[first], grid[first - 1]), edge(grid[last], grid[last + 1])];
  }

  window.lipExplorer = { compute, constants, potential, feasible, steps, READINGS, DEFAULTS };
})();
