"""The constant L of the whole fixed-point map f, composed from its operations (Section 3.4).

f = post-fusion ∘ fusion ∘ residual, L = L̂ · ‖M‖ · L̄ with the n × n comparison matrix M of the fusion layer:

| reading  | up path j→i, d = j−i | ‖M‖                              |
|----------|----------------------|----------------------------------|
| printed  | 2^d                  | Frobenius, √ΣL̃_i²                |
| reported | conv · norm · 2^d    | Frobenius: the paper's L values  |
| spectral | conv · norm · 2^d    | ‖M‖₂                             |
| perron   | conv · norm · 2^d    | ρ(M), in the norm with weights D |

"printed" leaves out the 1x1 conv and norm of the up path and is no bound for a model that has them; the others are bounds, each
at least as tight as the one before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from lipmdeq.bounds import operations as op
from lipmdeq.bounds.banach import a_posteriori_error, steps
from lipmdeq.bounds.matrices import frobenius, perron, spectral
from lipmdeq.bounds.operations import check_choice, check_range, check_whole, lip_compose

CONVS = ("conv", "conv_residual", "conv_down")  # in Operations
READINGS = ("printed", "reported", "spectral", "perron")
# Rows of the paper's ablation table; a name says what f does, here, in `lipmdeq.model` and in configurations alike. The authors'
# code ran S4, S6-sum and S7-sum; the paper's text describes S4-sum, S6 and S7.
ABLATIONS = ("S1", "S2", "S3", "S4", "S4-sum", "S5", "S6", "S6-sum", "S7", "S7-sum", "MDEQ")


@dataclass(frozen=True, eq=False)  # holds an array, which has no plain ==
class Operations:
    """Constants of the operations inside f, from which every L here is composed; infinity means "no bound"."""

    norm: float  #: norms with affine part
    act: float  #: activations
    drop: float  #: dropout
    conv: float  #: 1x1 convs
    conv_residual: float  #: 3x3 convs of the residual block
    conv_down: float  #: 3x3 stride-2 convs
    post_norm: float  #: the norm after fusion
    mix1: tuple[float, float]  #: weights of identity and branch in the residual block
    mix2: tuple[float, float]  #: the same in the fusion
    weights: np.ndarray  #: n × n fusion weights, diagonal unused

    @property
    def L_hat(self) -> float:
        """Residual block, Eq. (hat): norm3∘act∘(skip + branch · norm2∘dropout∘conv∘act∘norm1∘conv)."""
        skip, branch = self.mix1
        inner = (self.norm, self.conv_residual, self.act, self.norm, self.conv_residual, self.drop)
        return lip_compose(self.norm, self.act, skip + lip_compose(branch, *inner))

    @property
    def L_bar(self) -> float:
        """Post-fusion, Eq. (bar): norm ∘ conv1x1 ∘ act."""
        return lip_compose(self.post_norm, self.conv, self.act)

    def fusion_matrix(self, up: str = "full") -> np.ndarray:
        """M (n × n): M_ii = skip, M_ij = branch · w_ij · L_fuse(i, j); up paths "full" or "printed" (2^d)."""
        check_choice("up", up, ("printed", "full"))
        skip, branch = self.mix2
        extra = (self.conv, self.norm) if up == "full" else ()
        n = len(self.weights)
        M = np.diag(np.full(n, float(skip)))
        for d in range(1, n):  # a path depends on the level difference d alone
            down = lip_compose(branch, op.lip_down(d, self.conv_down, self.norm, self.act))
            raised = lip_compose(branch, op.lip_up(2**d), *extra)
            low, high = np.arange(d, n), np.arange(n - d)
            M[low, high] = down * self.weights[low, high]
            M[high, low] = raised * self.weights[high, low]
        return M

    def _read(self, reading: str) -> np.ndarray:
        """M with the up path of that reading."""
        check_choice("reading", reading, READINGS)
        return self.fusion_matrix("printed" if reading == "printed" else "full")

    def L_tilde(self, reading: str = "reported") -> np.ndarray:
        """Fusion row by row, Eq. (tilde): L̃_i = √ΣM_ij² (shape n), with the up path of that reading."""
        return np.linalg.norm(self._read(reading), axis=1)

    def fusion_norm(self, reading: str = "perron") -> float:
        """‖M‖ in that reading."""
        M = self._read(reading)
        return perron(M)[0] if reading == "perron" else spectral(M) if reading == "spectral" else frobenius(M)

    def L(self, reading: str = "perron") -> float:
        """Eq. (overall): L = L̂ · ‖M‖ · L̄; the Perron reading holds in the norm with weights D."""
        return lip_compose(self.L_hat, self.fusion_norm(reading), self.L_bar)


@dataclass(frozen=True)
class LipschitzSpec:
    """Hyperparameters of Lipschitz MDEQ that fix its Lipschitz constant, under the paper's names.

    With n = 1 nothing is fused and M = [[1 − α2]]. `train=False` in methods switches dropout off. The paper's L̄ = γ̄ca counts γ̄
    for the norm after fusion too; if that norm has no affine part (as in the CIFAR model) its constant is 1: set `post_affine` to
    False, then L̄ = ca. The same for γ̄ = 1; for γ̄ < 1 only False is sound.
    """

    a: float = 0.4  #: slope of the scaled ReLU, in (0, 1]
    c: float = 2.0  #: target norm of the conv operators, > 0
    gamma: float = 1.0  #: bound γ̄ on the absolute values of the norms' γ, > 0
    alpha1: float = 0.5  #: convex mix in the residual block, in (0, 1)
    alpha2: float = 0.3  #: convex mix in the fusion, in (0, 1)
    n: int = 4  #: number of resolutions, whole, 1 … 64
    p: float = 0.3  #: dropout rate, in [0, 1)
    post_affine: bool = True  #: has the norm after fusion a γ?

    def __post_init__(self) -> None:
        ranges = {"a": (0, 1, "(]"), "c": (), "gamma": (), "alpha1": (0, 1), "alpha2": (0, 1), "p": (0, 1, "[)")}
        checked = {name: check_range(name, getattr(self, name), *limits) for name, limits in ranges.items()}
        checked["n"] = check_whole("n", self.n, 1, 64)
        if not isinstance(self.post_affine, bool):
            raise ValueError(f"post_affine = {self.post_affine!r}: must be True or False")
        for name, value in checked.items():  # frozen: the checked and converted values are stored once, here
            object.__setattr__(self, name, value)

    def operations(self, train: bool = True) -> Operations:
        """The constants of all operations of this spec."""
        norms = {"norm": self.gamma, "post_norm": self.gamma if self.post_affine else 1.0}
        mixes = {"mix1": (1 - self.alpha1, self.alpha1), "mix2": (1 - self.alpha2, self.alpha2)}
        drop, weights = op.lip_dropout(self.p, train), op.fusion_weights(self.n)
        return Operations(act=self.a, drop=drop, weights=weights, **norms, **mixes, **dict.fromkeys(CONVS, self.c))

    def L_hat(self, train: bool = True) -> float:
        """Residual block: (1−α1)γ̄a + α1γ̄³c²a²/(1−p)."""
        return self.operations(train).L_hat

    @property
    def L_bar(self) -> float:
        """Post-fusion: γ̄ca."""
        return self.operations().L_bar

    def L_tilde(self, reading: str = "reported") -> np.ndarray:
        """Fusion, row norms L̃_i of M (shape n)."""
        return self.operations().L_tilde(reading)

    def fusion_matrix(self, up: str = "full") -> np.ndarray:
        """Comparison matrix M of the fusion layer (n × n)."""
        return self.operations().fusion_matrix(up)

    def comparison_matrix(self, train: bool = True) -> np.ndarray:
        """Comparison matrix N = L̄ M L̂ of the whole f (n × n): ‖f_i(z)−f_i(z')‖ ≤ Σ_j N_ij‖z_j−z'_j‖."""
        return self.L_bar * self.fusion_matrix() * self.L_hat(train)

    def L(self, reading: str = "perron", train: bool = True) -> float:
        """The Lipschitz constant of f in one of the `READINGS`; of the backward map too (for "perron" with weights 1/D)."""
        return self.operations(train).L(reading)

    @property
    def D(self) -> np.ndarray:
        """Weights (shape n, min 1) of ‖z‖_D² = Σd_i²‖z_i‖², the norm of the Perron reading, for every p."""
        return perron(self.fusion_matrix())[1]

    @property
    def cond_D(self) -> float:
        """max(D)/min(D): the price of reading a statement about ‖·‖_D in plain l2."""
        return float(self.D.max())

    def reshaped(self, train: bool = True) -> Operations:
        """What c proves if it bounds the reshaped kernels only: 3c for 3x3, 2c with stride 2, c for 1x1."""
        c3, c2 = op.lip_conv_reshaped(self.c, 3, 1), op.lip_conv_reshaped(self.c, 3, 2)
        return replace(self.operations(train), conv_residual=c3, conv_down=c2)

    def ablation(self, row: str, *, train: bool = True) -> Operations:
        """The constants when a change of the paper's ablation table is undone, or all of them ("MDEQ").

        S1 no clip of γ and S3 free convs: no bound. S2 GN for MGN (γ̄/√ε, ε = 1e-5), S4 the uniform mean 1/(n−1) for the softmax
        weights of the fusion, S5/S6/S7 plain sums x + g(x) for the first/second/both mixes; "-sum": every weight of the fusion is
        one. "MDEQ": GN, ReLU, plain sums everywhere, while γ and the conv norms are this spec's (MDEQ bounds neither).
        """
        check_choice("ablation", row, ABLATIONS)
        ops, free, plain = self.operations(train), math.inf, (1.0, 1.0)
        gn = {"norm": op.lip_gn(ops.norm), "post_norm": op.lip_gn(ops.post_norm)}
        changes: dict = {
            "S1": {"norm": free, "post_norm": free if self.post_affine else 1.0},  # no γ, nothing to free
            "S2": gn,
            "S3": dict.fromkeys(CONVS, free),
            "S4": {"weights": op.fusion_weights(self.n, "mean")},
            "S5": {"mix1": plain},
            "S6": {"mix2": plain},
            "S7": {"mix1": plain, "mix2": plain},
            "MDEQ": {"act": op.lip_relu(), "mix1": plain, "mix2": plain, **gn},
        }[row.removesuffix("-sum")]
        if row == "MDEQ" or row.endswith("-sum"):
            changes["weights"] = op.fusion_weights(self.n, "sum")
        return replace(ops, **changes)


@dataclass(frozen=True)
class PotentialSpec:
    """The certified family, ``block: potential``: L is its one parameter tau, whatever the weights.

    f = M·P ∘ h: the layers h and the paths P are 1-Lipschitz, with dropout and without, and ‖M‖₂ = tau for all n and α2. Hence
    L = tau in the plain norm. :mod:`lipmdeq.model` holds the layers and the proofs.
    """

    tau: float = 0.9

    def __post_init__(self) -> None:
        object.__setattr__(self, "tau", check_range("tau", self.tau, 0, 1))

    def L(self, train: bool = True) -> float:
        """The Lipschitz constant of f in the plain norm: tau in both modes."""
        return self.tau

    def steps(self, tol: float = 1e-3) -> int:
        """Picard steps from z_0 = 0 after which the relative residual is at most `tol`: never None, since tau < 1."""
        return steps(self.tau, tol)

    @property
    def error_factor(self) -> float:
        """The a-posteriori factor 1/(1 − tau), at any z ‖z − z*‖ is at most this times the residual ‖f(z) − z‖."""
        return a_posteriori_error(self.tau, 1.0)
