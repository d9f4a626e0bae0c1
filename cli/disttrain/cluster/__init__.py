"""The command's way to an API server: which one, requests, and what of a job's pods and events is read there."""
