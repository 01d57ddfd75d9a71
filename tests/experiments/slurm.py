#!/usr/bin/env python3
"""A stand-in for a cluster under Slurm, for tests: one script behind the names sbatch, sacct, srun, sacctmgr, sinfo, scontrol.

`sbatch` notes its arguments in $FAKE_SLURM/<id>.json, runs the job at once in the background and prints its number; `sacct`
says how the jobs of that folder stand. What a job asks for (GPUs, memory, minutes) is noted, not enforced.
"""

import json
import os
import subprocess
import sys
from pathlib import Path


def main() -> int:
    name, args, jobs = Path(sys.argv[0]).name, sys.argv[1:], Path(os.environ["FAKE_SLURM"])
    if name == "sbatch":
        number = 100 + len(list(jobs.glob("*.json")))
        (jobs / f"{number}.json").write_text(json.dumps(args))
        wrapped = next(a for a in args if a.startswith("--wrap=")).removeprefix("--wrap=")
        output = args[args.index("--output") + 1].replace("%j", str(number))
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        done = jobs / f"{number}.done"
        script = f"( {wrapped} ) > '{output}' 2>&1; echo $? > '{done}.part'; mv '{done}.part' '{done}'"
        given = {**os.environ, "SLURM_JOB_ID": str(number)}
        subprocess.Popen(["sh", "-c", script], env=given, start_new_session=True, stdin=subprocess.DEVNULL,
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        print(number)
    elif name == "sacct":
        for job in jobs.glob("*.json"):
            done = job.with_suffix(".done")
            state = "RUNNING" if not done.exists() else "COMPLETED" if done.read_text().strip() == "0" else "FAILED"
            print(f"{job.stem}|{state}")
    elif name == "srun":
        command = next(i for i, a in enumerate(args) if not a.startswith("-"))
        os.execvp(args[command], args[command:])
    elif name == "sacctmgr":
        print("default")
    elif name == "sinfo":
        print("gpu*")
    elif name == "scontrol":
        print("MinJobAge               = 300 sec")
    return 0


if __name__ == "__main__":
    sys.exit(main())
