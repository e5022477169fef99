"""What runs inside the processes of a test run. This folder is put on their PYTHONPATH, so it holds nothing else."""
