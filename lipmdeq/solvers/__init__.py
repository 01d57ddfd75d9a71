"""Fixed points and their gradients: Picard, Anderson, Broyden; implicit, JFB, Neumann, phantom, unrolled. Knows no model."""

from lipmdeq.solvers.gradients import JFB, Implicit, Neumann, Phantom, Unrolled, deq, jacobian_regularisation
from lipmdeq.solvers.loop import Anderson, Broyden, Picard, Solver
from lipmdeq.solvers.solution import ConvergenceError, Memory, Solution, SolverWarning
