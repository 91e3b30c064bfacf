"""Predictions: every example once, in order."""
