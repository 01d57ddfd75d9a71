"""Exercise Colab's first cell and the Binder folder in fresh environments: lesson 1 and train.ipynb must run there.

Usage: python tools/colab.py [colab] [binder] [--python /path/to/python] [--folder /path/with/room] [--cells N]

- ``colab``: a new environment with nothing but a kernel, and a module ``google.colab`` that is a stand-in. The notebooks get the
  first cell that ``make address`` writes, for a repository on this disk that holds the last commit; the cell clones and installs.
- ``binder``: a new environment with nothing but pip, a clone of the last commit, then ``.binder/postBuild`` in it.

Each takes some minutes and about 7 GB, most of it torch, in a temporary folder that is deleted at the end. What is not tried:
the services themselves, the packages that Colab brings, and conda, which makes Binder's interpreter.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from address import ROOT, address, with_cell
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

NOTEBOOKS = ("01_banach.ipynb", "train.ipynb")
OTHERS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "PIP_CONSTRAINT", "IPYTHONDIR")  # of the caller


def run(*words: object, **options: object) -> None:
    subprocess.run([str(w) for w in words], check=True, env=clean(), **options)


def clean(**more: str) -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if k not in OTHERS}, **more}


def publish(folder: Path) -> str:
    """A bare repository whose branch main is the last commit, and its address."""
    origin = folder / "origin" / "lipmdeq"
    run("git", "init", "-q", "--bare", "-b", "main", origin)
    run("git", "push", "-q", origin, "HEAD:refs/heads/main", cwd=ROOT)
    return f"file://{origin}"


def environment(folder: Path, python: str) -> Path:
    """The interpreter of a new environment."""
    run(python, "-m", "venv", folder)
    return folder / "bin" / "python"


def execute(notebook: dict, python: Path, cwd: Path, name: str, cells: int | None) -> None:
    """All cells, or the first ones, with the kernel of an environment; an error in one of them ends this program."""
    notebook = {**notebook, "cells": [c for c in notebook["cells"] if c["cell_type"] == "code"][:cells]}
    start = time.perf_counter()
    kernels = cwd / "kernels"
    (kernels / "fresh").mkdir(parents=True, exist_ok=True)
    spec = {"argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "fresh"}
    (kernels / "fresh" / "kernel.json").write_text(json.dumps({**spec, "language": "python"}))
    client = NotebookClient(
        nbformat.reads(json.dumps(notebook), 4),
        timeout=3600,
        kernel_name="fresh",
        resources={"metadata": {"path": str(cwd)}},
    )
    client.create_kernel_manager()
    client.km.kernel_spec_manager = KernelSpecManager(kernel_dirs=[str(kernels)])
    client.execute(env=clean(OMP_NUM_THREADS="1"))
    texts = [o.get("text", "") for c in client.nb.cells for o in c.get("outputs", []) if o.output_type == "stream"]
    last = next((line for text in reversed(texts) for line in reversed(text.splitlines()) if line.strip()), "")
    print(f"  {name}: {len(client.nb.cells)} cells in {time.perf_counter() - start:.0f} s; {last.strip()}", flush=True)


def colab(folder: Path, interpreter: str, cells: int | None) -> None:
    url = publish(folder)
    for name in NOTEBOOKS:  # each notebook is a machine of its own, but to install once is enough
        python = folder / "colab" / "bin" / "python"
        if not python.exists():
            environment(folder / "colab", interpreter)
            run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "ipykernel")
            site = next((folder / "colab" / "lib").glob("python*")) / "site-packages"
            (site / "google" / "colab").mkdir(parents=True)
            (site / "google" / "colab" / "__init__.py").touch()
            (site / "stand_in_for_colab.pth").write_text("import google.colab\n")  # is loaded at the start, as there
        here = folder / name.removesuffix(".ipynb")
        here.mkdir()
        source = json.loads((ROOT / "notebooks" / name).read_text("utf8"))
        execute(with_cell(source, url), python, here, name, cells)


def binder(folder: Path, interpreter: str, cells: int | None) -> None:
    run("git", "clone", "-q", publish(folder), folder / "lipmdeq")
    python = environment(folder / "binder", interpreter)
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    subprocess.run(["sh", ".binder/postBuild"], cwd=folder / "lipmdeq", env=clean(PATH=path), check=True)
    subprocess.run([python, "-m", "jupyterlab", "--version"], env=clean(), check=True)
    for name in NOTEBOOKS:
        place = folder / "lipmdeq" / "notebooks"
        execute(json.loads((place / name).read_text("utf8")), python, place, name, cells)


def main() -> None:
    places = {"colab": colab, "binder": binder}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=list(places), help="colab, binder (default: both)")
    parser.add_argument("--python", default=sys.executable, help="the interpreter (default: this one's version)")
    parser.add_argument("--folder", help="where the temporary folder is made: 8 GB are needed")
    parser.add_argument("--cells", type=int, help="only so many code cells of each notebook (default: all)")
    args = parser.parse_args()
    if unknown := [what for what in args.what if what not in places]:
        parser.error(f"{unknown[0]}: must be colab or binder")
    print(f"address of the repository: {address() or 'none yet, so one on this disk'}", flush=True)
    for what in args.what:
        start = time.perf_counter()
        print(f"{what}:", flush=True)
        with TemporaryDirectory(prefix=f"lipmdeq-{what}-", dir=args.folder) as folder:
            places[what](Path(folder).resolve(), args.python, args.cells)
        print(f"{what}: fine, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
