"""Code that runs inside the processes of a test run. This folder is on their PYTHONPATH, so it holds nothing else."""
