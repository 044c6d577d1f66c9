"""Tasks, and the executors that run them: this process, Dask workers, Slurm jobs."""
