"""Measurements. Only ratios within one run mean anything: variants take turns, and the machine is what it is."""
