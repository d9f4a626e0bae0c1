"""Sinks for figures besides metrics.jsonl: event files, MLflow, Weights & Biases. Packages are imported on demand."""
