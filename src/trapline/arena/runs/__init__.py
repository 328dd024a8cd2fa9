"""Grades a field of submissions here or on a cluster, and stores the results."""
