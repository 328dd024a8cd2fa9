"""Runs a program beside a submission in a sandbox, and talks to it."""
