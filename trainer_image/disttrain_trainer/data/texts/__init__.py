"""Texts of JSON Lines files, tokenised while they are read."""
