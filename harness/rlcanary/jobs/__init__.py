"""A job and where it runs: this machine, Slurm or Ray."""
