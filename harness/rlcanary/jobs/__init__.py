"""Jobs, and the executors that run them: this machine, Slurm or Ray."""
