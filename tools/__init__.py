"""What is run to write the documentation, and by nobody else."""
