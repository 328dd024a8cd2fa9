"""Standings: from graded cells to who is ahead, where, by how much and how surely."""
