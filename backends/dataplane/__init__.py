"""Wanted kernel state, the difference to what is there, and the loop that applies it."""
