/* A map of the plane and two ways to its fixed point: the mathematics of the equilibrium player.

   f(z) = A g(z) + b,  A = scale · R(angle) · diag(stretch, 1/stretch),  g(t) = (1−bend) t + bend tanh t  (per coordinate)

   R is a rotation and g has slopes in (0, 1], with 1 at t = 0. So ‖f(z) − f(z')‖ ≤ scale·stretch·‖z − z'‖, and no smaller
   constant will do: L = scale·stretch. */
(() => {
  "use strict";

  const DEFAULTS = { scale: 0.85, angle: 60, stretch: 1, bend: 0.5, m: 3, x: -2.5, y: 2.5, tol: 1e-4, max: 300 };
  const B = [1, 0.5];
  const FAR = 1e6; // beyond this an iteration counts as diverged

  const norm = (z) => Math.hypot(z[0], z[1]);
  const minus = (u, v) => [u[0] - v[0], u[1] - v[1]];
  const dot = (u, v) => u[0] * v[0] + u[1] * v[1];

  function check(params) {
    const s = { ...DEFAULTS, ...params };
    const fail = (name, range) => {
      throw new RangeError(`${name} = ${s[name]}: must be ${range}`);
    };
    for (const name of Object.keys(DEFAULTS)) if (!Number.isFinite(s[name])) fail(name, "a number");
    if (s.scale < 0) fail("scale", ">= 0");
    if (s.stretch < 1) fail("stretch", ">= 1");
    if (s.bend < 0 || s.bend > 1) fail("bend", "in [0, 1]");
    if (![1, 2, 3].includes(s.m)) fail("m", "1, 2 or 3");
    if (!(s.tol > 0)) fail("tol", "> 0");
    if (!Number.isInteger(s.max) || s.max < 1) fail("max", "a whole number >= 1");
    return s;
  }

  /** The matrix A (2 × 2). */
  function linear({ scale, angle, stretch }) {
    // exact at multiples of 90 degrees, where sin and cos of a rounded π are not
    const quarter = ((angle % 360) + 360) % 360;
    const [cos, sin] = { 0: [1, 0], 90: [0, 1], 180: [-1, 0], 270: [0, -1] }[quarter] ?? [
      Math.cos((angle * Math.PI) / 180),
      Math.sin((angle * Math.PI) / 180),
    ];
    return [
      [scale * cos * stretch, (-scale * sin) / stretch],
      [scale * sin * stretch, (scale * cos) / stretch],
    ];
  }

  /** f as a function of z. */
  function map(s) {
    const A = linear(s);
    const g = (t) => (1 - s.bend) * t + s.bend * Math.tanh(t);
    return (z) => {
      const u = [g(z[0]), g(z[1])];
      return [dot(A[0], u) + B[0], dot(A[1], u) + B[1]];
    };
  }

  /** Jacobian of f at z. */
  function jacobian(s, z) {
    const slope = z.map((t) => 1 - s.bend * Math.tanh(t) ** 2);
    return linear(s).map((row) => [row[0] * slope[0], row[1] * slope[1]]);
  }

  /** Largest singular value of a 2 × 2 matrix. */
  function spectralNorm([[a, b], [c, d]]) {
    return (Math.hypot(a + d, c - b) + Math.hypot(a - d, b + c)) / 2;
  }

  /** Largest modulus of an eigenvalue of a 2 × 2 matrix. */
  function spectralRadius([[a, b], [c, d]]) {
    const half = (a + d) / 2;
    const square = ((a - d) / 2) ** 2 + b * c;
    return square < 0 ? Math.sqrt(half * half - square) : Math.abs(half) + Math.sqrt(square);
  }

  /** All fixed points that Newton's method finds from a grid of starts. */
  function fixedPoints(s) {
    const f = map(s);
    const found = [];
    for (let i = -3; i <= 3; i++)
      for (let j = -3; j <= 3; j++) {
        let z = [1.5 * i + 0.1, 1.5 * j - 0.07];
        for (let k = 0; k < 60 && norm(z) < FAR; k++) {
          const [[a, b], [c, d]] = jacobian(s, z);
          const det = (1 - a) * (1 - d) - b * c;
          const r = minus(f(z), z);
          const step = [((1 - d) * r[0] + b * r[1]) / det, (c * r[0] + (1 - a) * r[1]) / det];
          const size = norm(step);
          const damp = size > 2 ? 2 / size : 1;
          z = [z[0] + damp * step[0], z[1] + damp * step[1]];
          if (size < 1e-13 * (1 + norm(z))) break;
        }
        const solved = norm(minus(f(z), z)) < 1e-10 * (1 + norm(z));
        if (solved && !found.some((other) => norm(minus(other, z)) < 1e-6 * (1 + norm(z)))) found.push(z);
      }
    return found.map((z) => {
      const J = jacobian(s, z);
      return { z, norm: spectralNorm(J), radius: spectralRadius(J) };
    });
  }

  /** Weights α, sum 1, with ‖Σ α_i g_i‖ least (type II); a tiny relative ridge keeps parallel g_i harmless. */
  function andersonWeights(g) {
    const last = g.length - 1;
    const diffs = g.slice(0, last).map((v) => minus(v, g[last]));
    const sizes = diffs.map((v) => norm(v) || 1);
    const unit = diffs.map((v, i) => [v[0] / sizes[i], v[1] / sizes[i]]);
    const right = unit.map((v) => -dot(v, g[last]));
    const ridge = 1e-12;
    let x = [];
    if (last === 1) x = [right[0] / (dot(unit[0], unit[0]) + ridge)];
    if (last === 2) {
      const [p, q, o] = [dot(unit[0], unit[0]) + ridge, dot(unit[1], unit[1]) + ridge, dot(unit[0], unit[1])];
      const det = p * q - o * o;
      x = [(q * right[0] - o * right[1]) / det, (p * right[1] - o * right[0]) / det];
    }
    const alpha = x.map((value, i) => value / sizes[i]);
    return [...alpha, 1 - alpha.reduce((sum, value) => sum + value, 0)];
  }

  /** Iterates until ‖f(z) − z‖ ≤ tol: m = 1 is Picard, else Anderson with the last m evaluations. */
  function iterate(s, m) {
    const f = map(s);
    const history = [];
    const points = [];
    const residuals = [];
    let z = [s.x, s.y];
    for (let k = 0; k < s.max; k++) {
      const fz = f(z);
      const g = minus(fz, z);
      points.push(z);
      residuals.push(norm(g));
      const out = !(norm(z) < FAR);
      if (out || residuals[k] <= s.tol)
        return { points, residuals, evaluations: k + 1, outcome: out ? "diverged" : "converged" };
      history.push({ fz, g });
      if (history.length > m) history.shift();
      const alpha = andersonWeights(history.map((entry) => entry.g));
      z = [0, 1].map((i) => history.reduce((sum, entry, t) => sum + alpha[t] * entry.fz[i], 0));
    }
    return { points, residuals, evaluations: s.max, outcome: "not converged" };
  }

  /** Everything the page shows: both runs, L, Banach's bound on the Picard steps, the fixed points.

      Banach: ‖f(z_k) − z_k‖ ≤ L^k ‖f(z_0) − z_0‖, so `bound` steps are enough; null if L ≥ 1. */
  function run(params = {}) {
    const s = check(params);
    const [picard, anderson] = [iterate(s, 1), iterate(s, s.m)];
    const L = s.scale * s.stretch;
    const r0 = picard.residuals[0];
    let bound = null;
    if (L < 1) {
      bound = r0 <= s.tol ? 0 : L === 0 ? 1 : Math.max(0, Math.ceil(Math.log(s.tol / r0) / Math.log(L)));
      while (bound > 0 && L ** (bound - 1) * r0 <= s.tol) bound--;
      while (L ** bound * r0 > s.tol) bound++;
    }
    const fixed = fixedPoints(s);
    const goal = picard.outcome === "converged" ? picard : anderson;
    const from = goal.outcome === "converged" ? goal.points.at(-1) : [s.x, s.y];
    fixed.sort((u, v) => norm(minus(u.z, from)) - norm(minus(v.z, from)));
    // `steps` makes z_k, and one evaluation more shows that its residual is small enough
    return { L, bound, picard: { ...picard, steps: picard.evaluations - 1 }, anderson, fixed };
  }

  window.eqPlayer = { run, map, fixedPoints, DEFAULTS };
})();
