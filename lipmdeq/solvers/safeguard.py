"""The safeguard that ties accelerated solvers to Banach's theorem: they are never more than one evaluation behind it."""

import numpy as np


class Safeguard:
    """Decides per sample whether the next evaluation is accelerated or a Picard step from the anchor.

    The anchor is the best point so far, r_b its residual ||f(z)-z||, r_0 the first one, k the evaluations after the
    first, q a Lipschitz quotient of f that was seen: the last residual ratio of a Picard step. On an L-contraction q <= L.
    Rule: accelerate only if log(r_b / r_0) / log(q) >= k.
    That is, if the progress so far is worth k Picard steps at the rate q. Then r_b <= L^(k-1) r_0 always, by induction:
    a Picard step from the anchor multiplies r_b by at most L; an accelerated one is tried only when
    r_b <= q^k r_0 <= L^k r_0 and, even if it fails, leaves r_b where it was. So at most one evaluation is ever lost
    against Banach's bound, and r_b -> 0. No rule can promise this against the *actual* Picard path: f may be constant
    near the next Picard point, which no evaluation elsewhere reveals. Further Picard steps make that rare (they can only
    help the argument above): where Picard is expected to finish by itself (q r_b below the target), or
    ||f(z)-z|| > ||f(z)||; one after an accelerated step whose residual is larger than its `promise`, impossible if f were
    affine; a run of 2, 4, 8, ... after an accelerated step without progress.

    If a Picard step enlarges r, f is no contraction in l2. Then acceleration is free, with a run of Picard steps after
    `patience` evaluations without progress: as runs grow, a map that contracts in another norm converges as well.

    `monotone=False` is for Broyden, whose residuals rise before they fall: left alone while the rule above holds, with such
    runs; q is the largest quotient seen, also in accelerated steps (`quotient`).
    """

    def __init__(self, patience: int, monotone: bool = True):
        self.patience, self.monotone, self.k = patience, monotone, -1
        # (B,) residual norm that the model of the last accelerated step allows; ||f(z)-f(z')|| / ||z-z'|| of the last step
        self.promise, self.quotient = None, 0.0

    def update(self, r: np.ndarray, size: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """||f(z)-z||, ||f(z)||, residual norm to reach, all (B,) -> (point becomes the anchor, accelerate next)."""
        self.k += 1
        if self.k == 0:
            self.r0, self.best, self.far, self.q, self.promise = r, r, r > size, np.zeros_like(r), r
            self.picard, self.fails = np.ones(len(r), bool), np.zeros(len(r), int)
            self.run, self.length, self.rate = self.fails, np.full(len(r), 2), self.q
            return self.picard, ~self.picard
        self.q = np.where(self.picard, r / self.best, self.q)
        self.rate = self.q if self.monotone else np.fmax(self.rate, np.fmax(self.q, np.minimum(self.quotient, 1)))
        doubt = ~self.picard & (r > self.promise)
        accept = (r < self.best) | (self.run > 0)
        self.best, self.far = np.where(accept, r, self.best), np.where(accept, r > size, self.far)
        self.fails = np.where(accept, 0, self.fails + 1)
        late = self.fails >= self.patience
        start = ~accept & (((self.q < 1) & ~self.picard) | late if self.monotone else late)
        self.run = np.where(start, self.length, np.maximum(self.run - 1, 0))
        self.length = np.where(start, 2 * self.length, self.length)
        ahead = np.log(self.best / self.r0) <= (self.k - 1e-6) * np.log(np.minimum(self.rate, 1))
        ahead &= self.rate * self.best >= target
        if self.monotone:
            ahead &= ~doubt & ~self.far
        self.picard = (self.run > 0) | ((self.q < 1) & ~ahead)
        return accept, ~self.picard

    def guess(self) -> np.ndarray:
        """The residual norm to expect next: rate times that of the anchor, or of the model."""
        if self.k == 0:
            return np.full_like(self.r0, np.inf)
        return np.minimum(self.q, 1) * np.where(self.picard, self.best, self.promise)
