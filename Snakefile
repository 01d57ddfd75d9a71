# The paper as a graph: configs/<protocol>/<table>/<row>.yaml -> a papermill run -> results/<protocol>/<table>/<row>/seed<k>.json
# -> results/<protocol>/tables/: tables as .md and .csv, figures as .svg
#
#   snakemake --cores 2                                   run what is missing of protocol cpu, two runs at a time
#   snakemake --cores 2 --config tables=table1,figure4    only these tables
#   snakemake --cores 2 --config seeds=1                  only the first seed of every row
#   snakemake --profile profiles/slurm --config protocol=paper   the paper's scale, on a cluster with GPUs (pip install '.[slurm]')
#   LIPMDEQ_GPUS=4 snakemake --profile profiles/gpus --config protocol=paper   the same on one machine with four GPUs
#   snakemake -n                                          only say what would be run
#
# A record that exists is never made again. A run that was killed goes on where it was, in its folder under runs/, and a
# finished one there is only published: delete both to repeat a run. Times of files, arbitrary after a clone, count only
# where contents disagree. Options of this graph: profiles/default/config.yaml.
import os
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

from lipmdeq.experiments.figures import CURVES, is_drawn, products
from lipmdeq.experiments.parameters import OneSentence, RunConfig
from lipmdeq.experiments.rows import read_run, times_file
from lipmdeq.experiments.tables import SHARED, TABLES as PRINTED, load

PROTOCOL = config.get("protocol", "cpu")
FOLDER = f"results/{PROTOCOL}/tables"
TABLES = str(config.get("tables", "table1,table2,figure4,table3,beyond")).split(",")
MOST = int(config.get("seeds", 3))
SEEDS = {  # rows with more than one seed
    "table1/mdeq": 2, "table1/lip-a1.0": 3, "table1/lip-a0.4": 3, "table1/lip-a0.1": 3, "beyond/potential-t0.9": 3,
}  # fmt: skip
# Rows of protocol cpu whose trained weights are kept beside their first record (half precision, below 2 MB).
WEIGHTS = ["table1/mdeq", "table1/lip-a1.0", "table1/lip-a0.4", "table1/lip-a0.1", "beyond/potential-t0.9"]


def wanted(protocol):
    """Records of each table, and the weights that are kept; a row that stands in two tables is run in the first of them. A
    record that does not fit its config stops the graph."""
    found, kept = {table: [] for table in TABLES}, []
    for table in TABLES:
        rows = sorted(Path("configs", protocol, table).glob("*.yaml"))
        if not rows:
            raise WorkflowError(f"configs/{protocol}/{table} holds no configuration: check protocol= and tables=")
        for path in rows:
            home = SHARED.get(f"{table}/{path.stem}", f"{table}/{path.stem}")
            for seed in range(min(MOST, SEEDS.get(home, 1))):
                found[table].append(f"results/{protocol}/{home}/seed{seed}.json")
                check(Path(found[table][-1]), path, seed)
            if protocol == "cpu" and home in WEIGHTS:
                kept.append(f"results/{protocol}/{home}/seed0.ckpt")
    return found, sorted(set(kept))


def check(record, path, seed):
    """Stop when a record is damaged, was changed, or was made with other parameters than its config has now."""
    try:
        if record.exists():
            read_run(record, RunConfig.from_yaml(path, seed=seed))
    except OneSentence as e:
        raise WorkflowError(str(e))


def tables():
    """The paper's tables that are asked for, with the records that there are; Figure 4 shows Table 1 too."""
    names = [t for t in PRINTED if t in TABLES or (t == "table1" and "figure4" in TABLES)]
    try:
        return {name: load(name, PROTOCOL) for name in names}
    except (OneSentence, ValueError) as e:
        raise WorkflowError(str(e))


RECORDS, KEPT = wanted(PROTOCOL)
LOADED = tables()


def times():
    """The measured times of the protocol, if there are any."""
    path = times_file(PROTOCOL, Path())
    return [str(path)] if path.exists() else []


def of_table(w):
    """What a table is made from; times do not count while it is what they give."""
    found = [*RECORDS[w.table], "results/paper.yaml", *times()]
    return [ancient(f) for f in found] if LOADED[w.table].is_written(FOLDER) else found


def of_figure(w):
    """What a figure is made from, in the same way: Figures 3 and 5 show some rows of Table 1."""
    if w.figure == "figure4":
        found = [*RECORDS["figure4"], *RECORDS.get("table1", []), "results/paper.yaml", *times()]
    else:
        found = [f for f in RECORDS["table1"] if f.split("/")[3] in CURVES]
    return [ancient(f) for f in found] if is_drawn(w.figure, LOADED, FOLDER) else found


wildcard_constraints:
    protocol="[a-z0-9]+",
    table="[a-z0-9]+",
    row="[A-Za-z0-9.-]+",
    seed="[0-9]+",
    figure="figure[0-9]",


localrules:
    all,
    weights,
    table,
    figure,


rule all:
    input:
        [*{f: None for found in RECORDS.values() for f in found}, *KEPT],
        [f"{FOLDER}/{name}" for name in products([t for t in PRINTED if t in TABLES])],


rule table:
    """One table of the paper."""
    input:
        of_table,
    output:
        multiext(FOLDER + "/{table}", ".md", ".csv"),
    params:
        python=sys.executable,
        protocol=PROTOCOL,
    shell:
        "{params.python} -m lipmdeq tables --protocol {params.protocol} --only {wildcards.table}.md,{wildcards.table}.csv"


rule figure:
    """One figure of the paper."""
    input:
        of_figure,
    output:
        FOLDER + "/{figure}.svg",
    params:
        python=sys.executable,
        protocol=PROTOCOL,
    shell:
        "{params.python} -m lipmdeq tables --protocol {params.protocol} --only {wildcards.figure}.svg"


rule run:
    """One training run."""
    input:
        config=ancient("configs/{protocol}/{table}/{row}.yaml"),
    output:
        record="results/{protocol}/{table}/{row}/seed{seed}.json",
    params:
        python=sys.executable,
        out="runs/{protocol}/{table}/{row}/seed{seed}",
        launch="sh profiles/gpus/on_free_gpu " if os.environ.get("LIPMDEQ_GPUS") else "",
    log:
        "runs/{protocol}/{table}/{row}/seed{seed}.log",
    threads: lambda w: RunConfig.from_yaml(f"configs/{w.protocol}/{w.table}/{w.row}.yaml").threads
    resources:
        mem_mb=lambda w: 16000 if w.protocol == "paper" else 3000,
        gpu=lambda w: 1 if w.protocol == "paper" else 0,
        runtime=lambda w: 48 * 60 if w.protocol == "paper" else 300,
    shell:
        "export OMP_NUM_THREADS={threads} JUPYTER_PREFER_ENV_PATH=1 && mkdir -p {params.out} && "
        "{params.launch}{params.python} -m papermill notebooks/train.ipynb {params.out}/train.ipynb -f {input.config} "
        "-p seed {wildcards.seed} -p out {params.out} --no-progress-bar > {log} 2>&1 && "
        "cp {params.out}/record.json {output.record}.part && mv {output.record}.part {output.record}"


rule weights:
    """The trained weights of a finished run, for lessons on trained models."""
    input:
        ancient("results/{protocol}/{table}/{row}/seed{seed}.json"),
    output:
        "results/{protocol}/{table}/{row}/seed{seed}.ckpt",
    params:
        python=sys.executable,
        source="runs/{protocol}/{table}/{row}/seed{seed}/checkpoint.ckpt",
    shell:
        "{params.python} -c 'import sys; from lipmdeq.experiments import export_weights; export_weights(*sys.argv[1:])' "
        "{params.source} {output}"

