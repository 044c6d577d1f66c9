"""Tasks, and where they are worked on: this process, Dask workers, Slurm jobs."""
