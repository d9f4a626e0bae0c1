"""Objects and memory of a job, before anything is created."""
