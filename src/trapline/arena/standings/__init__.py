"""Standings: from graded cells to ranks, differences and their uncertainty."""
