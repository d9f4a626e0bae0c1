"""`training.preflight`: whether the ranks' network is right and even, before anything is trained on it."""
