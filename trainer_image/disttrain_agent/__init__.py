"""PID 1 of a pod: starts its ranks, forwards signals, reaps, reports. Never imports torch."""
