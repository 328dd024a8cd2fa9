"""Grades one submission: intake, inspection, checks, measures, own tests, score."""
