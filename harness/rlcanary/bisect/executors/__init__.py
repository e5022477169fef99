"""Where commands run: processes of this machine, Slurm jobs, Ray jobs, behind one protocol (`job.Executor`)."""
