"""Context parallelism: ranks compute parts of the same sequences."""
